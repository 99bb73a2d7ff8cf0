"""Runs with kv.budget = auto: the probe, the controller, checkpoints, the report, and what is refused. Evaluations: see
test_eval_budget.py."""

import json
import math
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from small_runs import Command, arguments, metrics, one_thread, refused, train, without_clock
from sparse_rl import KV, Engine, Sampling, UserError
from sparse_rl.cli import main
from sparse_rl.config import PRESETS, Config
from sparse_rl.kv import cache
from sparse_rl.monitor.budget import BudgetState, Figures, Targets, smallest
from sparse_rl.plan import dimensions, make_plan
from sparse_rl.report.document import ReportSource
from sparse_rl.train.auto_budget import AutoBudget
from sparse_rl.train.memory import budgets_that_fit, plan_budget
from sparse_rl.world import ALONE
from test_resume import assert_same_run, state_of

AUTO = ["--kv.budget", "auto", "--kv.target-rejected", "0.2", "--correction.veto", "0.4", "--alerts.xi-p05", "none"]
AUTO += ["--rollout.samples-per-prompt", "8", "--checkpoint.every", "1", "--checkpoint.keep", "20", "--optimizer.lr", "0.02"]
AUTO += ["--rollout.max-tokens", "32"]
"""A veto that rejects answers of the random model, and targets that it meets below the longest sequence."""
SHRINKS = [*AUTO, "--kv.policy", "triattention"]
"""Of a run whose answers shrink, with a policy that needs statistics of its rollouts."""
STEPS = 11


def changes(run):
    return [json.loads(line) for line in (run / "budget.jsonl").read_text().splitlines()]


# The probe


@pytest.mark.parametrize("needed", range(1, 8))
def test_the_probe_finds_the_smallest_budget_with_few_measurements(needed):
    budgets = [10, 20, 30, 40, 50, 60]
    tried = []
    found = smallest(budgets, lambda budget: tried.append(budget) or budget >= 10 * needed)
    assert found == (10 * needed if needed < 7 else None)
    assert len(tried) <= 3 and len(tried) == len(set(tried))
    assert found is not None or 60 in tried


@pytest.mark.parametrize(
    ("needed", "fits", "found"), [(30, 40, 30), (30, 30, 30), (30, 20, None), (10, 10, 10), (10, 0, None)]
)
def test_the_probe_stays_below_budgets_that_run_out_of_memory(needed, fits, found):
    assert smallest([10, 20, 30, 40, 50, 60], lambda budget: budget >= needed if budget <= fits else None) == found


def test_budgets_end_at_the_longest_sequence():
    config = Config(
        kv={"policy": "rkv", "budget": "auto", "window": 4, "sinks": 4, "protect_prompt": False}, rollout={"max_tokens": 100}
    )
    assert budgets_that_fit(config, None, 50)[-1] == 150 and budgets_that_fit(config, None, 50)[0] == 16
    protected = Config(kv={"policy": "rkv", "budget": "auto", "protect_prompt": True}, rollout={"max_tokens": 100})
    assert budgets_that_fit(protected, None, 50)[-1] == 100


def test_budgets_end_at_what_fits_in_memory_with_a_slot_for_each_sample():
    """By the plan: 7B in 32 GiB has no room for budgets up to the longest sequence."""
    config = Config(
        kv={"policy": "rkv", "budget": "auto", "protect_prompt": False},
        model={"path": "7B", "dtype": "bfloat16", "lora": {"rank": 16, "merge": False}},
        rollout={"max_tokens": 16384},
        optimizer={"tokens_per_microbatch": 16640},
        eval={"problems": 0},
    )
    plan = make_plan(config, dimensions("7B"), memory_bytes=32 * 2**30, prompt_tokens=256)
    assert plan.config.kv.budget == 8320  # half of the longest sequence
    budgets = budgets_that_fit(config, plan, 256)
    every = budgets_that_fit(config, None, 256)
    assert budgets == every[: len(budgets)] and 256 < budgets[-1] < every[-1] == 16640
    largest, next_one = (plan_budget(config, plan, each) for each in (budgets[-1], every[len(budgets)]))
    assert largest.fits and largest.slots >= 8 and not (next_one.fits and next_one.slots >= 8)
    small = plan_budget(config, plan, budgets[0])
    assert small.slots > largest.slots  # memory stays, slots change


def test_the_smallest_budget_does_not_depend_on_a_window_that_follows_it():
    """Every budget tried leaves keys to choose. Until there is one, the window is that of the smallest."""
    for sinks, least in ((4, 16), (20, 80)):
        config = Config(kv={"policy": "triattention", "budget": "auto", "sinks": sinks}, rollout={"max_tokens": 500})
        budgets = budgets_that_fit(config, None, 50)
        assert budgets[0] == least
        for budget in budgets:
            kv = KV(**config.with_budget(budget).kv.model_dump())
            assert kv.recent == budget // 2 and kv.budget > kv.recent + kv.sinks
        assert config.kv.recent == least // 2


# The engine


def test_a_resized_engine_is_a_new_engine(model):
    """Same rollouts, same bytes, statistics kept."""
    prompts, sampling = [list(range(3, 40)), [7, 8, 9]], Sampling(max_tokens=40, stop=())
    options = {"policy": "triattention", "interval": 8, "dtype": "8bit", "protect_prompt": True}
    engine, fresh = (Engine(model, KV(budget=budget, **options), slots=slots) for budget, slots in ((24, 2), (40, 3)))
    engine.calibrate(prompts, 100)
    engine.generate(prompts, 2, sampling)
    engine.resize(40, 3)
    fresh.load_statistics(engine.statistics)
    left, right = (each.generate(prompts, 2, sampling) for each in (engine, fresh))
    assert [each.response for each in left] == [each.response for each in right]
    assert engine.cache.kv_bytes == fresh.cache.kv_bytes and engine.kv == fresh.kv
    assert engine.policy == fresh.policy and engine.policy.window == 20  # half of the budget


def test_statistics_of_a_few_tokens_are_gathered_again_after_a_resize(model):
    engine, long = Engine(model, KV(policy="triattention", budget=24, interval=8), slots=2), [list(range(3, 60))]
    engine.generate([[7, 8, 9]], sampling=Sampling(max_tokens=4))
    few = engine.statistics["query_mean"]
    engine.resize(40, 3)
    assert engine.statistics["query_mean"] is few
    engine.generate(long, sampling=Sampling(max_tokens=4))
    assert engine.calibrated_tokens == 57 and not torch.equal(engine.statistics["query_mean"], few)


# Runs


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """(A run whose answers shrink, its output): nothing interrupts it."""
    run = tmp_path_factory.mktemp("auto") / "run"
    code, out = Command(arguments(world, run, *SHRINKS, "--steps", str(STEPS), reward="short")).end()
    assert code == 0, out
    return run, out


def test_a_run_finds_its_budget_and_says_so(whole):
    run, out = whole
    assert "the smallest budget with at most 20.0% rejected" in out and "chosen" in out and "missed" in out
    assert "kv.budget is 32 from step 1 on, found by the probe: " in out
    assert "triattention 24+4 (auto)" in " ".join(out.split())
    first = changes(run)[0]
    assert (first["step"], first["before"], first["after"]) == (0, 0, metrics(run)[1]["kv/budget"])


def test_a_lower_budget_is_used_reported_and_exported(whole, tmp_path):
    """Answers shrink, so the budget that the probe missed is enough. The change is on the terminal, in budget.jsonl, in the
    checkpoint, in the metrics and in the model, and the bytes are those of the budget."""
    run, out = whole
    rows, log = metrics(run), changes(run)
    assert len(log) == 2 and log[1]["after"] == 24 and log[1]["reason"].endswith("in 8 steps leave room")
    step = log[1]["step"]
    assert f"kv.budget is 24 from step {step + 1} on, was 32: {log[1]['reason']} (16 slots, 112.0 KiB" in out
    assert state_of(run, STEPS)[1]["budget"]["changes"] == log
    assert [row["kv/budget"] for row in rows[1:]] == [32] * step + [24] * (STEPS - step)
    assert [row["step"] for row in rows if "perf/rebuild_s" in row] == [step]
    assert {row["kv/peak_bytes"] / (row["kv/budget"] + 4) for row in rows[1:]} == {4096}
    stored = json.loads((run / "model/sparse_rl.json").read_text())["kv"]
    assert stored["budget"] == 24 and "target_rejected" not in stored
    with one_thread():
        main(["export", str(run), str(tmp_path / "last")])
        main(["export", str(run), str(tmp_path / "early"), "--step", "2"])
    exported = [json.loads((tmp_path / name / "sparse_rl.json").read_text())["kv"]["budget"] for name in ("last", "early")]
    assert exported == [24, 32]
    assert "triattention 24+" in (tmp_path / "last" / "README.md").read_text()


def test_a_killed_run_with_auto_resumes_to_the_same_weights(world, whole, tmp_path):
    """Killed while the policy evicts by statistics of an earlier step, and once more after the budget has changed. All runs are
    in processes of their own, so that sums have the same order."""
    killed, again = tmp_path / "killed", whole[0]
    for number, resume in ((3, []), (9, ["--resume"])):
        command = Command(arguments(world, killed, *SHRINKS, "--steps", "500", *resume, reward="short"))
        command.read_to(f"step {number}/500")
        command.signal(signal.SIGKILL)
        assert command.end()[0] == -signal.SIGKILL
    steps, runs = max(STEPS, int(metrics(killed)[-1]["step"])), [killed]
    if steps > STEPS:  # the signal came late
        again = shutil.copytree(again, tmp_path / "again")
        runs.append(again)
    for run in runs:
        command = Command(arguments(world, run, *SHRINKS, "--steps", str(steps), "--resume", reward="short"))
        assert command.end()[0] == 0
    assert_same_run(again, killed, steps)
    assert changes(again) == changes(killed)


def test_rollouts_that_are_only_logged_are_no_evidence():
    """`log.traces_per_step` adds rows of weight 0 to a step. The controller counts the others, so it does not depend on the log."""
    auto = AutoBudget.__new__(AutoBudget)
    auto.spec, auto.world, auto.state, auto.budgets = PRESETS["paper"], ALONE, BudgetState(32), [16, 32]
    auto.targets = Targets(0.02)
    metrics = {"sparse/rejection_rate": 0.0, "sparse/xi_p05_long": 0.9, "response/p90_tokens": 30.0}
    auto.after_step(1, SimpleNamespace(row_weights={0: 1.0, 1: 4.0, 2: 0.0, 3: 0.0}), metrics)
    assert auto.state.window == (Figures(0.0, 2, 0.9, 30),)


def test_rows_of_budgets_after_the_checkpoint_are_dropped(world, whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    with (run / "budget.jsonl").open("a") as file:
        file.write('{"step": 99, "before": 24, "after": 32, "reason": "of a lost step"}\n{"step": 100, "bef')
    train(world, run, *SHRINKS, "--steps", str(STEPS), "--resume", reward="short")
    assert changes(run) == changes(whole[0])


def test_a_checkpoint_without_a_valid_budget_is_refused():
    auto = AutoBudget.__new__(AutoBudget)
    with pytest.raises(UserError, match="step 3 has no valid budget for kv.budget = auto"):
        auto.restore({"state": {"budget": "many"}}, 3)


def test_the_report_has_every_change_and_the_target(whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    with (run / "budget.jsonl").open("a") as file:
        file.write('{"step": 12, "before": "<b>"}\n{"step": 13, "bef')
    document, _ = ReportSource([run]).document()
    (shown,) = document["runs"]
    assert shown["budgets"] == changes(whole[0]) and shown["target"] == 0.2
    assert shown["columns"]["kv/budget"][1:] == [row["kv/budget"] for row in metrics(run)[1:]]
    assert "Budget: set by the run, went from 32 to 24 tokens in 1 change, to hold 20.0% rejected." in shown["sentences"]
    assert "budget.jsonl: skipped 1 line that cannot be read." in shown["notes"]


def at_step_2(run, copy):
    """A copy of a run that ended after two steps."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    for path in (copy / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > 2:
            shutil.rmtree(path)
    return copy


def test_a_higher_budget_is_used_holds_the_target_and_is_kept_over_a_resume(world, whole, tmp_path, capsys):
    """A stricter target raises the budget after one step. The next step has the larger cache, and meets the target."""
    run, resumed = (at_step_2(whole[0], tmp_path / name) for name in ("run", "resumed"))
    flags = [*SHRINKS, "--alerts.xi-p05", "0.999", "--resume", "--steps"]
    train(world, run, *flags, "4", reward="short")
    said, rows = " ".join(capsys.readouterr().out.split()), metrics(run)
    _, change = changes(run)
    assert (change["step"], change["before"], change["after"]) == (3, 32, 40)
    assert re.fullmatch(r"xi p05 of long responses 0\.\d\d \(limit 0\.999\)", change["reason"])
    assert f"kv.budget is 40 from step 4 on, was 32: {change['reason']} (16 slots, 176.0 KiB" in said
    assert [row["kv/budget"] for row in rows[1:]] == [32, 32, 32, 40]
    assert rows[3]["sparse/xi_p05_long"] < 0.999 < rows[4]["sparse/xi_p05_long"]
    assert [row["step"] for row in rows if "perf/rebuild_s" in row] == [3]
    assert rows[4]["kv/peak_bytes"] == 4096 * (40 + 4)
    assert state_of(run, 4)[1]["budget"]["changes"] == changes(run)
    assert json.loads((run / "model/sparse_rl.json").read_text())["kv"]["budget"] == 40
    for steps in ("3", "4"):
        train(world, resumed, *flags, steps, reward="short")
    assert_same_run(run, resumed, 4)
    assert changes(resumed) == changes(run)


# Too little memory


@pytest.fixture
def memory_for(monkeypatch):
    """Function that sets the largest budget for which there is memory. A larger cache ends as on a GPU that has no more."""

    def limit(budget):
        def allocated(rows, *given):
            if math.prod(rows[:2]) * rows[-1] > 2 * 16 * (budget + 4):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return allocate(rows, *given)

        monkeypatch.setattr(cache, "allocated", allocated)

    allocate = cache.allocated
    return limit


def test_targets_that_no_budget_in_memory_reaches_are_refused(world, tmp_path, capsys, memory_for):
    memory_for(24)
    sentence = refused(capsys, *arguments(world, tmp_path / "run", *AUTO))
    assert sentence.startswith("No budget up to 24 tokens, the most that fits in memory, has at most 20.0% rejected (found: ")
    remedies = (
        "lower rollout.max_tokens, use another kv.policy, set kv.protect_prompt = true, set kv.dtype = 8bit, raise kv.target"
    )
    assert remedies in sentence


def test_a_budget_that_memory_cannot_hold_leaves_the_run_as_it_was(world, whole, tmp_path, capsys, memory_for):
    """Another target asks for a larger budget, which does not fit. The run says so, says once that it misses the target, and
    learns what it learns without the target."""
    easy, hard = (at_step_2(whole[0], tmp_path / name) for name in ("easy", "hard"))
    flags = [*SHRINKS, "--steps", "5", "--resume"]
    train(world, easy, *flags, reward="short")
    memory_for(32)
    capsys.readouterr()
    train(world, hard, *flags, "--alerts.xi-p05", "0.999", reward="short")
    said = " ".join(capsys.readouterr().out.split())
    failed, unmet = (
        "kv.budget = 40 ran out of memory: the budget stays at 32.",
        "misses its targets: xi p05 of long responses ",
    )
    assert said.index(failed) < said.index("step 3/5") < said.index(unmet) < said.index("step 4/5")
    assert said.count(failed) == said.count("kv.budget = 32 is the largest that fits, and " + unmet) == 1
    assert "To hold them, lower rollout.max_tokens, use another kv.policy, " in said
    _, tried, last = changes(hard)
    assert (tried["step"], tried["before"], tried["after"]) == (3, 32, 32) and (last["before"], last["after"]) == (32, 32)
    assert tried["reason"].startswith("kv.budget = 40 ran out of memory, which was tried for this reason: xi p05 of long")
    assert state_of(hard, 5)[1]["budget"]["changes"] == changes(hard)
    (shown,) = ReportSource([hard]).document()[0]["runs"]
    assert shown["budgets"] == changes(hard)
    assert last["reason"].startswith("the largest budget misses the targets: xi p05 of long responses ")
    assert without_clock(metrics(easy)) == without_clock(metrics(hard))
    assert (easy / "model/model.safetensors").read_bytes() == (hard / "model/model.safetensors").read_bytes()


def test_a_run_resumes_with_the_largest_budget_for_which_there_is_memory(world, whole, tmp_path, capsys, memory_for):
    run = at_step_2(whole[0], tmp_path / "run")
    memory_for(24)
    train(world, run, *SHRINKS, "--steps", "3", "--resume", reward="short")
    reason, said = "only 24 tokens fit in the memory of this machine", " ".join(capsys.readouterr().out.split())
    assert f"kv.budget is 24 from step 3 on, was 32: {reason} (" in said
    assert [row["kv/budget"] for row in metrics(run)[1:]] == [32, 32, 24]
    assert changes(run)[1:] == [{"step": 2, "before": 32, "after": 24, "reason": reason}]
    killed = at_step_2(run, tmp_path / "killed")  # before it saved a checkpoint with the new budget
    assert changes(killed) == changes(run)
    train(world, killed, *SHRINKS, "--steps", "3", "--resume", reward="short")
    assert changes(killed) == changes(run)
    memory_for(1024)
    killed = at_step_2(run, tmp_path / "killed on a larger machine")
    train(world, killed, *SHRINKS, "--steps", "3", "--resume", reward="short")
    assert changes(killed) == changes(run)[:1]


def test_the_default_cache_follows_a_budget_that_the_run_sets(world, tmp_path):
    flags = [*AUTO, "--kv.policy", "triattention", "--kv.window", "auto", "--kv.protect-prompt", "true", "--steps"]
    train(world, tmp_path / "run", *flags, "1")
    train(world, tmp_path / "run", *flags, "2", "--resume", "--alerts.xi-p05", "0.999")  # a target that it misses
    assert [row["kv/budget"] for row in metrics(tmp_path / "run")[1:]] == [16, 16]  # the smallest that is tried
    stored = json.loads((tmp_path / "run/model/sparse_rl.json").read_text())["kv"]
    assert stored["window"] == "auto" and stored["budget"] > 16 and KV(**stored).recent == stored["budget"] // 2


# What is refused


def test_contradictions_are_refused_with_the_remedy(world, tmp_path, capsys):
    cases = {
        ("--kv.policy", "full"): "kv.budget = auto and kv.policy = full contradict each other: full evicts nothing.",
        ("--rollout.slots", "4"): "kv.budget = auto and rollout.slots = 4 contradict each other: a larger budget takes",
        ("--kv.target-rejected", "0"): "kv.target_rejected = '0' is invalid: input should be greater than 0.",
    }
    for flags, sentence in cases.items():
        assert refused(capsys, *arguments(world, tmp_path / "run", *AUTO, *flags)).startswith(sentence)
    never = "kv.budget = auto with kv.interval = 64 never evicts: a response of 32 tokens ends before the first compaction."
    flags = ["--kv.interval", "64", "--kv.protect-prompt", "true"]
    assert refused(capsys, *arguments(world, tmp_path / "run", *AUTO, *flags)).startswith(never)
    with pytest.raises(UserError, match="auto works only in train and in eval --mismatch: set a number"):
        KV(policy="rkv", budget="auto", protect_prompt=False).capacity  # noqa: B018


def test_a_run_in_which_no_budget_that_is_tried_can_evict_is_refused(world, tmp_path, capsys):
    """No smaller interval would help."""
    protected = [*AUTO, "--kv.protect-prompt", "true"]
    told = "kv.budget = auto tries budgets from 16 tokens on, and none evicts: a response has at most "
    for tokens, most in (("14", "14 tokens"), ("16", "16 tokens"), ("18", "16 tokens at a compaction")):
        sentence = refused(capsys, *arguments(world, tmp_path / "run", *protected, "--rollout.max-tokens", tokens))
        assert sentence == f"{told}{most}. Raise rollout.max_tokens to 22 or more, or train dense."
    wide = [*protected, "--kv.window", "40", "--rollout.max-tokens", "60"]
    told = "kv.budget = auto tries budgets from 88 tokens on, and none evicts: a response has at most 60 tokens. Raise "
    told += "rollout.max_tokens to 94 or more, lower kv.window or kv.sinks, or train dense."
    assert refused(capsys, *arguments(world, tmp_path / "run", *wide)) == told
    whole = [*AUTO, "--rollout.max-tokens", "4"]
    assert "none evicts: a prompt and its response have at most 13 tokens. Raise rollout.max_tokens to 10 or more" in refused(
        capsys, *arguments(world, tmp_path / "run", *whole)
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rollout.max-tokens", "8"], "kv.budget = auto tries budgets from 16 tokens on, and none evicts"),
        (["--kv.window", "100"], "kv.budget = auto tries budgets from 208 tokens on, and none evicts"),
        (["--kv.interval", "64"], "kv.budget = auto with kv.interval = 64 never evicts"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(world, tmp_path, capsys, flags, told):
    command = [*arguments(world, tmp_path / "run", *AUTO), "--kv.protect-prompt", "true", *flags]
    sentence = refused(capsys, *command, "--dry-run")
    assert sentence.startswith(told) and sentence == refused(capsys, *command)


@pytest.mark.parametrize("window", range(0, 20))
def test_the_smallest_budget_that_is_tried_is_the_one_that_must_evict(window):
    """The shortest response that a sentence names is enough for it."""
    kv = KV(policy="rkv", budget="auto", window=window, interval=4)
    needed = int(re.search(r"Raise rollout.max_tokens to (\d+) or more", kv.never_evicts(5, 8))[1])
    smaller = [tokens for tokens in range(1, 2 * needed) if kv.never_evicts(5, tokens)]
    assert smaller == list(range(1, needed))
    config = Config(kv=kv.model_dump(), rollout={"max_tokens": needed})
    least = budgets_that_fit(config, None, 5)[0]
    assert least == kv.least_auto and config.with_budget(least).kv.never_evicts(5, needed) is None


def test_targets_that_no_budget_reaches_are_refused_with_the_remedy(world, tmp_path, capsys):
    """Without eviction, quantisation alone misses them."""
    flags = [*AUTO, "--kv.dtype", "4bit", "--kv.target-rejected", "0.001", "--alerts.xi-p05", "0.999"]
    sentence = refused(capsys, *arguments(world, tmp_path / "run", *flags))
    assert sentence.startswith("No budget up to 41 tokens, the longest sequence, has at most 0.1% rejected")
    assert "lower rollout.max_tokens, use another kv.policy, set kv.protect_prompt = true, set kv.dtype = auto" in sentence
