"""A run may be evaluated on several held-out sets, and the plan says what that costs."""

import json
import math
import shutil
import tomllib
from types import SimpleNamespace

import pytest

from small_runs import arguments, metrics, one_thread, refused, train, without_clock
from sparse_rl import KV, Engine, Sampling
from sparse_rl.cli import build_parser, main
from sparse_rl.config import Config, DataConfig, from_flags, to_toml
from sparse_rl.config.run import MIN_DENSE_SLOTS
from sparse_rl.errors import UserError
from sparse_rl.format import duration
from sparse_rl.models.load import load_model
from sparse_rl.plan.dimensions import dimensions
from sparse_rl.plan.evaluation import evaluation_times, evaluations, run_s, share_of_run
from sparse_rl.plan.memory import make_plan
from sparse_rl.plan.roofline import GPUS, decode_s, step_time
from sparse_rl.report.document import ReportSource
from sparse_rl.report.figures import write_figures
from sparse_rl.report.runs import read
from sparse_rl.report.verdict import verdict
from sparse_rl.rewards.pool import pool_for
from sparse_rl.sizes import live_dense_pages
from sparse_rl.train import held_out
from sparse_rl.train.held_out import Evaluator
from sparse_rl.train.inputs import HeldOut

GIB = 2**30


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two files of problems that share no prompt. The second has the longer prompts."""
    folder = tmp_path_factory.mktemp("sets")
    for name, prompts in (("short", ["1:41+85=", "2:42+85=", "3:43+85="]), ("long", ["4:44+85=46+", "5:45+85=47+55="])):
        rows = [json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def scored(row):
    return {key: value for key, value in row.items() if key.startswith("eval/")}


# The option


def test_one_set_is_a_name_however_it_is_written():
    """So a run that was started with a name resumes with the same value."""
    args = build_parser().parse_args(["train", "--data.test", "a.jsonl"])
    for data in (DataConfig(test="a.jsonl"), DataConfig(test=["a.jsonl"]), from_flags(args, Config).data):
        assert data.test == "a.jsonl" and data.held_out == ("a.jsonl",)


@pytest.mark.parametrize("flag", ["a.jsonl,gsm8k", '["a.jsonl", "gsm8k"]'])
def test_several_sets_are_a_list(flag):
    config = from_flags(build_parser().parse_args(["train", "--data.test", flag]), Config)
    assert config.data.test == config.data.held_out == ("a.jsonl", "gsm8k")
    assert Config(**tomllib.loads(to_toml(config))) == config
    assert from_flags(build_parser().parse_args(["train", "--data.test", "none"]), Config).data.test is None


@pytest.mark.parametrize("wrong", [(), "", ("a.jsonl", "")])
def test_a_set_has_a_name(wrong):
    with pytest.raises(UserError, match="data.test = .* names no held-out set: .*"):
        DataConfig(test=wrong)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("short.jsonl,nope.jsonl", "No task or file is named nope.jsonl: "),
        ("short.jsonl,elsewhere/short.jsonl", "data.test has two sets named short (short.jsonl and elsewhere/short.jsonl): "),
        ("short.jsonl,short.jsonl", "data.test has two sets named short "),
        ("short.jsonl,simplerl-zoo-hard", "simplerl-zoo-hard has no test problems: "),
    ],
)
def test_sets_that_cannot_be_told_apart_or_found_are_refused(world, sets, tmp_path, monkeypatch, capsys, test, told, dry):
    (sets / "elsewhere").mkdir(exist_ok=True)
    (sets / "elsewhere/short.jsonl").write_text((sets / "long.jsonl").read_text())
    monkeypatch.chdir(sets)
    flags = ["--data.test", test, "--eval.problems", "2", *dry]
    assert refused(capsys, *arguments(world, tmp_path / "run", *flags)).startswith(told)
    assert not (tmp_path / "run").exists()


def test_an_empty_set_is_refused_before_the_model_is_loaded(world, sets, tmp_path, capsys):
    (tmp_path / "empty.jsonl").touch()
    flags = ["--data.test", f"{sets}/short.jsonl,{tmp_path}/empty.jsonl", "--eval.problems", "2"]
    shutil.copytree(world / "model", tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"damaged")
    sentence = refused(capsys, *arguments(world, tmp_path / "run", *flags, "--model.path", str(tmp_path / "model")))
    assert sentence.startswith(f"{tmp_path}/empty.jsonl") and not (tmp_path / "run").exists()


# The run


def test_every_set_is_scored_as_it_is_alone(world, sets, tmp_path, capsys):
    """Before training to the bit, with each cache. The terminal, the table, the report and the figures have both."""
    short, long = (str(sets / f"{name}.jsonl") for name in ("short", "long"))
    flags = ["--steps", "1", "--eval.problems", "3"]
    rows = {}
    for name, test in (("short", short), ("long", long), ("both", f"{short},{long}")):
        train(world, tmp_path / name, *flags, "--data.test", test)
        rows[name] = [scored(row) for row in metrics(tmp_path / name)]
    for row in rows["both"]:
        assert {key.split("/")[1] for key in row} == {"short", "long"}
    assert list(rows["both"][0]) == [*rows["short"][0], *rows["long"][0]]  # one set after the other
    assert rows["both"][0] == rows["short"][0] | rows["long"][0]
    assert rows["both"][-1] == rows["short"][-1] | rows["long"][-1]
    out = capsys.readouterr().out.split("\nsparse_rl: ")[-2]
    keys = [f"eval/{name}/pass@1{cache}" for name in ("short", "long") for cache in ("", "_sparse")]
    assert all(f"step {step}: {key} " in out for step in (0, 1) for key in keys)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert [row[:3] for row in cells if row[2]] == [
        ["sparse_rl", "short", "dense"], ["", "short", "rkv 20+4"], ["", "long", "dense"], ["", "long", "rkv 20+4"],
    ]  # fmt: skip
    shown, _ = ReportSource([tmp_path / "both"]).document()
    assert [score["key"] for score in shown["runs"][0]["scores"]] == keys
    said = " ".join(verdict(read(tmp_path / "both", "both")).sentences)
    assert all(f"Held-out {name} with {cache}" in said for name in ("short", "long") for cache in ("a dense", "the sampler's"))


def test_every_task_is_graded_by_its_own_reward(tmp_path, monkeypatch):
    """The training task's set by the reward that is open already."""
    for name in ("gsm8k-train", "gsm8k-test", "math500"):
        (tmp_path / f"{name}.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n' * 2)
    opened = []
    monkeypatch.setattr(
        held_out, "pool_for", lambda reward, function, **more: opened.append(function) or pool_for(reward, function, **more)
    )
    flags = {"data.dir": tmp_path, "data.train": "gsm8k", "data.test": "arithmetic,gsm8k,math500", "eval.problems": 2,
             "method": "dense", "rollout.max-tokens": 4, "rollout.prompts-per-step": 2, "rollout.samples-per-prompt": 2,
             "steps": 1, "reward.workers": 1, "run-dir": tmp_path / "run"}  # fmt: skip
    with one_thread():
        main(["train", *(text for key, value in flags.items() for text in (f"--{key}", str(value)))])
    assert opened == ["arithmetic", "math_answer"] * 2  # before and after
    before = metrics(tmp_path / "run")[0]
    assert [before[f"eval/{name}/no_verdict"] for name in ("arithmetic", "gsm8k", "math500")] == [0, 0, 0]


def test_the_best_checkpoint_may_be_of_any_set(world, sets, tmp_path, capsys):
    """A resumed run has the same best checkpoint. Changed answers of that set are noticed, those of another set are not."""
    for name in ("short", "long"):
        (tmp_path / f"{name}.jsonl").write_text((sets / f"{name}.jsonl").read_text())
    run, metric, test = tmp_path / "run", "eval/long/pass@1", f"{tmp_path}/short.jsonl,{tmp_path}/long.jsonl"
    flags = ["--method", "dense", "--checkpoint.every", "1", "--checkpoint.keep", "1", "--checkpoint.best", metric]
    flags += ["--data.test", test, "--eval.problems", "2", "--eval.every", "1"]
    train(world, run, *flags, "--steps", "2")
    train(world, tmp_path / "whole", *flags, "--steps", "3")
    capsys.readouterr()
    other, own = "the answers of", "scores before and after step"
    for name, noticed in (("short", False), ("long", True)):
        file, copy = tmp_path / f"{name}.jsonl", tmp_path / f"run-{name}"
        shutil.copytree(run, copy)
        was = file.read_text()
        file.write_text(was.replace('"answer": "1"', '"answer": "2"'))
        train(world, copy, *flags, "--steps", "3", "--resume")
        out = " ".join(capsys.readouterr().out.split()).lower()
        assert (other in out and own in out) == noticed
        file.write_text(was)
    train(world, run, *flags, "--steps", "3", "--resume")
    earned = {row["step"]: row[metric] for row in metrics(run)[1:]}
    best = max(earned, key=earned.__getitem__)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{best}", "step-3"}
    assert without_clock(metrics(run)) == without_clock(metrics(tmp_path / "whole"))
    changed = [each if each != test else str(tmp_path / "long.jsonl") for each in flags]
    sentence = refused(capsys, *arguments(world, run, *changed, "--steps", "4", "--resume"))
    assert sentence.startswith(f"data.test is {tmp_path}/long.jsonl now but was [")


def test_a_set_that_fell_is_named(tmp_path):
    """Also where another set rose: the verdict is the worse one."""
    rows = [{"step": step, "reward/mean": 0.3, "policy/entropy": 0.1} for step in range(14)]
    for row, means in ((rows[0], (0.2, 0.8)), (rows[-1], (0.6, 0.1))):
        for name, mean in zip(("easy", "hard"), means, strict=True):
            key = f"eval/{name}/pass@1"
            row |= {key: mean, f"{key}_low": mean - 0.05, f"{key}_high": mean + 0.05}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = verdict(read(tmp_path, "run"))
    assert judged.state == "collapsed"
    assert judged.sentences[0].startswith("Collapse: yes. The held-out score of hard fell from 80.0% [75.0%, 85.0%] to 10.0%")


def test_figures_of_sets_with_similar_names_are_different_files(tmp_path):
    rows = [{"step": 0} | {f"eval/{name}/pass@1": value for name, value in (("a.b", 0.1), ("a-b", 0.9))}]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    written = write_figures(ReportSource([tmp_path]), tmp_path / "figures")
    assert len(set(written)) == len(written) == 4 and len({path.read_bytes() for path in written}) == 4


# The plan


def planned(*flags, model="1.5B", memory_gib=140.0, **options):
    args = build_parser().parse_args(["plan", model, *flags])
    base = {"model": {"path": model, "dtype": "bfloat16"}, "kv": {"policy": "rkv", "protect_prompt": False}}
    config = from_flags(args, Config, base)
    return make_plan(config, dimensions(model), memory_bytes=int(memory_gib * GIB), **options)


def test_an_evaluation_costs_its_decode_steps():
    """Recomputed by hand: 2 sets of 300 problems, each cache at the tokens it holds on average. Sparse slots run in waves. A dense
    cache runs as many sequences as its pages hold at half of their response, and a problem starts when another ends."""
    plan = planned("--data.test", "gsm8k,math500", "--eval.problems", "300", "--rollout.slots", "128", "--eval.cache", "both")
    gpu, tokens = GPUS["h200"], plan.config.rollout.max_tokens
    by_cache = {each.cache: each for each in evaluation_times(plan, gpu)}
    assert list(by_cache) == ["dense", "sparse"] and {each.rollouts for each in by_cache.values()} == {600}
    prefill = 2 * plan.dims.active_params * 600 * 256 / (0.79 * gpu.flops)
    waves = sum(tokens * decode_s(plan.dims, slots, 512 + 129 / 2, 2, gpu) for slots in (128, 128, 44))
    assert by_cache["sparse"].slots == 128 and by_cache["sparse"].seconds == pytest.approx(2 * waves + prefill)
    pages = live_dense_pages(256, tokens, plan.evaluation_slots, 1)
    at_once = min(300, int(64 * pages / (256 + tokens / 2)))
    assert at_once < by_cache["dense"].slots == plan.evaluation_slots
    steps = 300 / at_once * tokens
    seconds = 2 * steps * decode_s(plan.dims, at_once, 256 + tokens / 2, 2, gpu) + prefill
    assert by_cache["dense"].seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("every", "steps"), [(0, 7), (1, 7), (3, 7), (7, 7), (9, 7), (5, 20)])
def test_evaluations_are_counted_as_the_trainer_runs_them(every, steps):
    config = Config(steps=steps, eval={"every": every})
    assert evaluations(config) == 1 + sum(config.evaluates_after(step) for step in range(1, steps + 1))
    assert evaluations(Config(steps=steps, eval={"every": every, "problems": 0})) == 0
    assert evaluations(Config(steps=steps, data={"train": "mine.jsonl"})) == 0


def test_the_share_is_of_all_steps_and_evaluations():
    plan, gpu = planned("--steps", "40", "--eval.every", "10", "--optimizer.gradient-checkpointing"), GPUS["h200"]
    evaluated = 5 * sum(each.seconds for each in evaluation_times(plan, gpu))
    assert share_of_run(plan, gpu) == pytest.approx(evaluated / (evaluated + 40 * step_time(plan, gpu).total_s))
    assert share_of_run(planned("--eval.problems", "0"), gpu) == 0


def test_the_time_of_a_run_is_that_of_all_steps_and_evaluations():
    """Recomputed by hand: 40 steps, and 200 problems before the first, after the last and every 10th, all in one wave."""
    flags = ["--steps", "40", "--eval.every", "10", "--eval.problems", "200", "--eval.cache", "sparse"]
    plan = planned(*flags, "--rollout.slots", "256", "--optimizer.gradient-checkpointing")
    gpu = GPUS["h200"]
    prefill = 2 * plan.dims.active_params * 200 * 256 / (0.79 * gpu.flops)
    evaluated = plan.config.rollout.max_tokens * decode_s(plan.dims, 200, 512 + 129 / 2, 2, gpu) + prefill
    expected = 40 * step_time(plan, gpu).total_s + 5 * evaluated
    assert run_s(plan, gpu) == pytest.approx(expected)
    both = plan.replanned(plan.config.model_copy(update={"compare": ("sparse_rl", "dense")}))
    assert run_s(both, gpu) == pytest.approx(2 * expected)
    alone = plan.replanned(plan.config.changed(eval={"problems": 0}))
    assert run_s(alone, gpu) == pytest.approx(40 * step_time(plan, gpu).total_s)


LORA = ["--model.lora.rank", "16", "--optimizer.gradient-checkpointing", "--rollout.max-tokens", "16384"]


@pytest.mark.parametrize(("model", "tokens", "few"), [("14B", "16384", True), ("7B", "1024", False)])
def test_auto_leaves_the_dense_cache_out_where_few_of_its_slots_fit(model, tokens, few):
    """What is not evaluated costs neither time nor memory."""
    lora = [*LORA[:-1], tokens]
    plan = planned(*lora, model=model)
    assert (plan.evaluation_slots < MIN_DENSE_SLOTS) == few
    assert [each.cache for each in evaluation_times(plan, GPUS["h200"])] == (["sparse"] if few else ["dense", "sparse"])
    assert ("evaluation" in {phase.name for phase in plan.phases}) == (not few)
    asked = planned(*lora, "--checkpoint.best", "eval/arithmetic/pass@1", model=model)
    assert [each.cache for each in evaluation_times(asked, GPUS["h200"])] == ["dense", "sparse"]


def test_the_caches_that_are_evaluated():
    def caches(dense_slots, problems=256, is_sparse=True, best="reward/mean", **settings):
        config = Config(eval=settings, checkpoint={"best": best})
        return config.evaluation_caches(is_sparse=is_sparse, dense_slots=dense_slots, problems=problems)

    both = ["dense", "sparse"]
    assert caches(15) == ["sparse"] and caches(16) == caches(None) == both
    assert caches(8, problems=8) == both  # all of them at once
    assert caches(3, slots=3) == both and caches(3, best="eval/a_sparse/pass@1") == both  # asked for
    assert caches(3, best="eval/a/pass@1_sparse") == ["sparse"]
    assert (
        caches(3, cache="dense") == ["dense"] and caches(99, cache="sparse") == ["sparse"] and caches(3, cache="both") == both
    )
    assert all(caches(3, is_sparse=False, cache=each) == ["dense"] for each in ("auto", "sparse", "dense", "both"))


@pytest.mark.parametrize(("model", "tokens"), [("14B", "16384"), ("7B", "1024")])
def test_the_trainer_evaluates_with_the_caches_of_its_plan(model, tokens):
    """For prompts as long as planned. Of two sets, the one with the most problems and the longest prompts counts."""
    plan = planned(*LORA[:-1], tokens, "--data.test", "gsm8k,math500", model=model)
    long, few = (HeldOut(source, [None] * count, [[1] * 256] * count) for source, count in (("gsm8k", 256), ("math500", 3)))
    engine = SimpleNamespace(is_sparse=True, slots=plan.slots, kv=plan.config.kv)
    evaluator = Evaluator(plan.config, [few, long], engine, None, plan, None, None, None, None)
    assert evaluator.caches() == plan.evaluation_caches
    said = f"a dense cache has room for {plan.evaluation_slots} slots"
    assert said in (evaluator.remark() or said) and (evaluator.remark() is None) == ("dense" in plan.evaluation_caches)


def test_slots_that_are_asked_for_have_the_cache_that_is_evaluated():
    sparse, dense = (planned(*LORA, "--eval.slots", "40", "--eval.cache", cache) for cache in ("sparse", "dense"))
    sizes = [plan.phases[-1].parts["evaluation cache"] for plan in (sparse, dense)]
    assert sizes[0] / sizes[1] == pytest.approx(640 / (256 + 16384 / 3 + 128), rel=0.05)
    for plan in (sparse, dense):
        assert [each.slots for each in evaluation_times(plan, GPUS["h200"])] == [40]
    own = planned(*LORA, "--eval.cache", "sparse")
    assert own.evaluation_slots == 0 and [each.slots for each in evaluation_times(own, GPUS["h200"])] == [256]


def test_ranks_share_an_evaluation():
    flags = ["--data.test", "gsm8k", "--eval.problems", "256", "--rollout.slots", "64", "--optimizer.gradient-checkpointing"]
    one, four = (planned(*flags, "--ranks.count", count) for count in ("1", "4"))
    times = [{each.cache: each for each in evaluation_times(plan, GPUS["h200"])}["sparse"] for plan in (one, four)]
    assert times[0].rollouts == times[1].rollouts == 256
    assert times[0].seconds == pytest.approx(4 * times[1].seconds)


def share_of(cache, folder):
    written = json.loads((folder / "plan.json").read_text())["evaluation"]
    times = {name: cost["time_computed_s"] for name, cost in written["caches"].items()}
    return written["share_of_run_computed"] * times[cache] / sum(times.values())


def test_plan_says_what_an_evaluation_costs(tmp_path, capsys):
    flags = ["--steps", "40", "--eval.every", "10", "--eval.problems", "256", "--data.test", "gsm8k,math500"]
    main(["plan", "1.5b-full-24gb", "--gpu", "H100", *flags, "--json", str(tmp_path / "plan.json")])
    out = " ".join(capsys.readouterr().out.split())
    assert "Evaluation time, computed for H100, all responses at full length" in out
    assert "│ sparse │ gsm8k, math500 │ 512 │" in out and f"│ 5 │ {100 * share_of('sparse', tmp_path):.1f}% │" in out
    record = json.loads((tmp_path / "plan.json").read_text())
    written = record["evaluation"]
    assert written["evaluations"] == 5 and 0 < written["share_of_run_computed"] < 1
    evaluated_s = 5 * sum(cost["time_computed_s"] for cost in written["caches"].values())
    steps_s = 40 * record["step_time_computed_s"]["triattention 512+128"]
    assert record["run_time_computed_s"] == pytest.approx(steps_s + evaluated_s)
    assert f"This run takes {duration(steps_s + evaluated_s)} at best: 40 steps and 5 evaluations." in out
    for cache, cost in written["caches"].items():
        assert cache in ("dense", "sparse") and cost["rollouts"] == 512 and math.isfinite(cost["time_computed_s"])
        assert f"{cost['time_computed_s']:,.1f}" in out
    main(["plan", "1.5b-full-24gb", "--eval.problems", "0", "--json", str(tmp_path / "plan.json")])
    assert "No evaluation (eval.problems = 0)." in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["evaluation"]["evaluations"] == 0
    main(["plan", "7B", "--gpu-memory", "8GiB"])
    assert "does not fit" in capsys.readouterr().out


def test_an_evaluation_of_protected_prompts_fills_the_slots():
    """The sampler's store holds a prompt once for eight samples. An evaluation has one sample per prompt, and as many prompts
    as slots. Afterwards the sampler's store is back."""
    model, prompts = load_model("tiny", device="cpu"), [[5 + number] * 70 for number in range(16)]
    engine = Engine(model, KV(policy="rkv", budget=24, interval=8, protect_prompt=True), slots=16)
    engine.reserve_prompts(70, prompts=2, samples=8)
    store, sampling = engine.cache.prompts, Sampling(max_tokens=20, stop=())
    alone = engine.generate(prompts, 1, sampling)
    waits = engine.stats.steps
    sets = [HeldOut("gsm8k", [None] * 16, prompts)]
    evaluator = Evaluator(Config(), sets, engine, None, None, None, None, None, None)
    with evaluator._prompt_store(engine):
        together = engine.generate(prompts, 1, sampling)
        assert engine.cache.prompts.pages >= 16 * 2 and engine.stats.peak_pages == 16 * 2
        assert 3 * engine.stats.steps < waits
    assert engine.cache.prompts is store
    assert [each.response for each in together] == [each.response for each in alone]
    with evaluator._prompt_store(Engine(model, KV(policy="full"), slots=2)):
        pass  # another engine keeps its cache
