"""`sparse-rl eval`: scores a user can trust, the same seeds under every cache, and work that is never done twice."""

import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

import sparse_rl
from small_runs import Command, one_thread, refused
from sparse_rl import KV, UserError
from sparse_rl.cli import main
from sparse_rl.evaluate.benchmark import Cost, EvalChunk, EvalSample, ends_in_repetition, score
from sparse_rl.evaluate.compare import settings
from sparse_rl.evaluate.result import difference
from sparse_rl.evaluate.runner import parts
from sparse_rl.evaluate.statistics import Estimate, average, mean_interval, paired_difference, pass_at_k, quantile
from sparse_rl.evaluate.table import latex_rows, shown
from sparse_rl.evaluate.watch import EvalProgress
from sparse_rl.evaluate.work import FinishedPart, Work
from sparse_rl.rollout.stats import Progress

# Statistics


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample():
    for samples in range(1, 9):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            drawn = list(itertools.combinations([True] * right + [False] * (samples - right), k))
            assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, drawn)) / len(drawn), abs=1e-12)


def test_pass_at_k_is_unbiased_for_k_fresh_samples():
    chance, samples = 0.3, 6
    for k in range(1, samples + 1):
        expected = sum(stats.binom.pmf(right, samples, chance) * pass_at_k(samples, right, k) for right in range(samples + 1))
        assert expected == pytest.approx(1 - (1 - chance) ** k)


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="pass@5 needs 5 samples, but there are 4"):
        pass_at_k(4, 1, 5)


def bootstrap(values, draws=4000):
    """The middle 95 % of the means of problems drawn anew."""
    values = np.asarray(values)
    chosen = np.random.default_rng(1).integers(len(values), size=(draws, len(values)))
    return np.quantile(values[chosen].mean(axis=1), [0.025, 0.975])


PROBLEMS = {
    "one sample": (400, 1),
    "four samples": (150, 4),
    "a contest": (40, 32),
}


@pytest.mark.parametrize(("problems", "samples"), PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("chance", [0.25, 0.6])
def test_intervals_are_those_of_a_bootstrap_over_problems(problems, samples, chance):
    rng = np.random.default_rng(0)
    hardness = rng.beta(2 * chance, 2 * (1 - chance), size=problems)
    values, others = (rng.binomial(samples, hardness * factor) / samples for factor in (1.0, 0.8))
    ours = [mean_interval(values.tolist(), samples), paired_difference(others.tolist(), values.tolist(), samples)]
    for estimate, drawn in zip(ours, (values, others - values), strict=True):
        low, high = bootstrap(drawn)
        width = high - low
        assert estimate.mean == pytest.approx(drawn.mean()) and estimate.low < estimate.mean < estimate.high
        assert estimate.high - estimate.low == pytest.approx(width, rel=0.15)
        assert [estimate.low, estimate.high] == pytest.approx([low, high], abs=0.15 * width)


def test_intervals_of_pass_at_k_are_those_of_a_bootstrap_over_problems():
    rng = np.random.default_rng(0)
    right = rng.binomial(8, rng.beta(0.5, 1.5, size=200))
    samples = [
        EvalSample(problem, number, float(number < count), 1, "stop", False, 1, "")
        for problem, count in enumerate(right)
        for number in range(8)
    ]
    scored = score(samples, Cost(), 8, ks=(1, 4, 8))
    for k, estimate in scored.pass_at.items():
        values = [pass_at_k(8, int(count), k) for count in right]
        low, high = bootstrap(values)
        assert estimate.mean == pytest.approx(np.mean(values))
        assert [estimate.low, estimate.high] == pytest.approx([low, high], abs=0.15 * (high - low))
    assert scored.pass_at[1] == scored.mean


@pytest.mark.parametrize(("problems", "samples"), [(100, 1), (40, 8)])
def test_intervals_hold_the_truth_as_often_as_they_say(problems, samples):
    rng, held, paired, repeats = np.random.default_rng(0), 0, 0, 1000
    for _ in range(repeats):
        hardness = rng.beta(1, 1.5, size=problems)
        values, others = (rng.binomial(samples, hardness * factor) / samples for factor in (1.0, 0.9))
        one, two = mean_interval(values.tolist(), samples), paired_difference(others.tolist(), values.tolist(), samples)
        held += one.low <= 0.4 <= one.high
        paired += two.low <= -0.04 <= two.high
    assert 0.925 < held / repeats < 0.985 and 0.925 < paired / repeats < 0.985


def test_intervals_stay_open_where_everything_is_right():
    for samples in (1, 8):
        assert mean_interval([1.0] * 64, samples) == pytest.approx((1.0, 0.943, 1.0), abs=1e-3)
        assert mean_interval([0.0] * 64, samples) == pytest.approx((0.0, 0.0, 0.057), abs=1e-3)
    same = paired_difference([1.0] * 64, [1.0] * 64)
    assert same.mean == 0 and same.low == pytest.approx(-same.high) and 0.02 < same.high < 0.08
    wilson = stats.binomtest(13, 50).proportion_ci(method="wilson")
    assert mean_interval([1.0] * 13 + [0.0] * 37)[1:] == pytest.approx((wilson.low, wilson.high))


def test_intervals_of_other_rewards_are_those_of_students_t():
    values = [2.0, -1.0, 3.5, 0.0, 8.0]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert mean_interval(values) == pytest.approx((np.mean(values), low, high), rel=1e-4)
    assert paired_difference(values, [0.0] * 5) == pytest.approx((np.mean(values), low, high), rel=1e-4)
    for degrees in (1, 2, 3, 4, 5, 6, 10, 30, 300):
        assert quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)


def test_without_verdicts_there_is_no_score():
    assert all(math.isnan(number) for number in (*mean_interval([]), *paired_difference([], [])))
    scored = score([EvalSample(0, 0, None, 3, "length", False, 1, "")], Cost(no_verdict=1), 1)
    assert math.isnan(scored.mean.mean) and scored.pass_at == {} and scored.ungraded == 1
    assert shown(scored.mean, share=True) == "-" and latex_rows([]) == ["cache \\\\"]


def test_the_interval_of_an_average_is_narrower_than_its_parts():
    assert average([Estimate(0.5, 0.4, 0.6), Estimate(0.3, 0.2, 0.4)]) == pytest.approx((0.4, 0.4 - 0.0707, 0.4707), abs=1e-3)


def test_graded_rewards_have_a_mean_and_no_pass_at_k():
    samples = [EvalSample(0, number, 0.25 * number, 1, "stop", False, 1, "") for number in range(4)]
    scored = score(samples, Cost(), 4, ks=(1, 2, 4))
    assert scored.mean.mean == pytest.approx(0.375) and scored.pass_at == {}


def test_graded_rewards_from_0_to_1_are_no_trials():
    """Their interval is as wide as they spread, not as wide as that of as many coins."""
    rng = np.random.default_rng(0)
    values, others = rng.uniform(0.5, 0.7, 100), rng.uniform(0.45, 0.65, 100)
    samples = [[EvalSample(problem, 0, each, 1, "stop", False, 1, "") for problem, each in enumerate(given)]
               for given in (values.tolist(), others.tolist())]  # fmt: skip
    gap = difference(FinishedPart(samples[0]), FinishedPart(samples[1]), 1)
    for estimate, drawn in ((score(samples[0], Cost(), 1).mean, values), (gap, values - others)):
        assert estimate[1:] == pytest.approx(bootstrap(drawn), abs=0.15 * np.ptp(bootstrap(drawn)))


def test_a_response_that_loops_to_its_end_is_seen():
    loop = [7, 8, 9] * 100
    assert ends_in_repetition([1, 2, 3, *loop]) and not ends_in_repetition([*loop, 1, 2, 3])
    assert not ends_in_repetition(loop[:200]) and not ends_in_repetition(list(range(300)))
    assert ends_in_repetition([*range(64)] * 5) and not ends_in_repetition([*range(65)] * 5)


# What is compared


def test_caches_are_named_by_policy_and_budget():
    found = settings("full, rkv@512,snapkv@100+10", {"sinks": "2", "protect_prompt": "true"}, {})
    assert [each.name for each in found] == ["full", "rkv@512", "snapkv@100+10"]
    assert found[0].kv == KV(policy="full")
    assert found[1].kv == KV(policy="rkv", budget=512, interval=128, sinks=2, protect_prompt=True)
    assert found[2].kv == KV(policy="snapkv", budget=100, interval=10, sinks=2, protect_prompt=True)
    assert settings("rkv@100", {"interval": "7"}, {})[0].name == "rkv@100+7"


def test_a_named_cache_of_the_trained_policy_has_the_stored_options():
    stored = KV(policy="rkv", budget=96, interval=32, window=4, protect_prompt=False).model_dump()
    own, other, protected = (
        settings(name, given, stored)[0].kv
        for name, given in (("rkv@64", {}), ("tova@64", {}), ("rkv@64", {"protect_prompt": "true"}))
    )
    assert own == KV(**stored | {"budget": 64, "interval": 16})
    assert other == KV(policy="tova", budget=64, interval=16)
    assert protected == KV(**stored | {"budget": 64, "interval": 16, "protect_prompt": True})


def test_without_names_the_cache_is_the_models_own():
    stored = KV(policy="snapkv", budget=96, interval=32, window=4, protect_prompt=False).model_dump()
    assert settings(None, {}, {}) == settings("full", {}, {})
    full, own = settings(None, {}, stored)
    assert (full.name, own.name, own.kv) == ("full", "snapkv@96+32", KV(**stored))
    assert settings(None, {"budget": "200"}, stored)[1].kv == KV(**stored | {"budget": 200, "interval": 50})
    assert settings(None, {"policy": "tova"}, {})[1].name == "tova@512"
    assert len(settings(None, {}, {"policy": "full"})) == 1


@pytest.mark.parametrize(
    ("compare", "given", "sentence"),
    [
        ("full,rkv", {}, "--compare rkv is not a valid cache: use full or POLICY@BUDGET[+INTERVAL]"),
        ("full@64", {}, "--compare full@64 is not a valid cache: use "),
        ("rkv@", {}, "--compare rkv@ is not a valid cache: use "),
        ("full,", {}, "--compare  is not a valid cache: use "),
        ("rkv@64,rkv@64+16", {}, "--compare lists rkv@64 twice"),
        ("rkv@64", {"budget": "32"}, "kv.budget and --compare both set a cache: use only --compare, in the form "),
        ("rkv@12", {}, "--compare rkv@12 is too small: it must exceed window + sinks = 12. Try --compare rkv@64."),
        (
            "rkv@40+8:8bit",
            {"window": 36},
            "--compare rkv@40+8:8bit is too small: it must exceed window + sinks = 40. Try --compare rkv@160+8:8bit.",
        ),
        ("expected@0", {}, "--compare expected@0 is too small: it must exceed window + sinks = 8. Try --compare expected@64."),
        ("rkv@64+0", {}, "--compare rkv@64+0 has an interval of 0: it must be at least 1. Try --compare rkv@64+16."),
        (
            "rkv@auto+0:4bit",
            {},
            "--compare rkv@auto+0:4bit has an interval of 0: it must be at least 1. Try --compare rkv@auto+128:4bit.",
        ),
    ],
)
def test_caches_that_make_no_sense_are_refused(compare, given, sentence):
    with pytest.raises(UserError) as error:
        settings(compare, given, {})
    assert str(error.value).startswith(sentence)


def test_chunks_hold_every_problem_once():
    for problems, count in itertools.product((1, 5, 64), (1, 3, 7)):
        chunks = parts(range(problems), count)
        assert [number for chunk in chunks for number in chunk] == list(range(problems))
        assert len(chunks) == min(problems, count) and max(map(len, chunks)) - min(map(len, chunks)) <= 1


# The command


def evaluate(*flags):
    with one_thread():
        main(["eval", *map(str, flags)])


def rows(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def arguments(world, out, *flags, reward="parity"):
    """Of an evaluation of eight problems of a random model under two caches."""
    base = {
        "benchmarks": world / "problems.jsonl",
        "compare": "full,random@20+4",
        "kv.window": 4,
        "kv.protect-prompt": "false",
        "max-tokens": 24,
        "reward.function": f"{world / 'eval_rewards.py'}:{reward}",
        "reward.workers": 1,
        "reward.truncated": "grade",  # the model is random, and nearly all of its answers are cut off
        "out": out,
    }
    return [world / "model", *(text for key, value in base.items() for text in (f"--{key}", value)), *flags]


@pytest.fixture(scope="module")
def eval_world(world):
    (world / "eval_rewards.py").write_text(
        f"""
import os, signal

def trainer():
    with open(f"/proc/{{os.getppid()}}/stat") as file:  # our parent is our supervisor
        return int(file.read().rpartition(")")[2].split()[1])

def parity(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]

def length(prompts, completions, **columns):
    return [10.0 * len(text) for text in completions]

def some(prompts, completions, **columns):
    return [None if prompts[0].startswith("3") else 1.0]

def interrupts_once(prompts, completions, **columns):
    if prompts[0].startswith("5") and not os.path.exists({str(world / "interrupted")!r}):
        open({str(world / "interrupted")!r}, "w").close()
        os.kill(trainer(), signal.SIGINT)
    return parity(prompts, completions)

def kills_once(prompts, completions, **columns):
    '''Ends the evaluation at its sixth problem, the first time.'''
    with open({str(world / "graded")!r}, "a") as file:
        file.write(prompts[0] + chr(10))
    if prompts[0].startswith("5") and not os.path.exists({str(world / "killed")!r}):
        open({str(world / "killed")!r}, "w").close()
        os.kill(trainer(), signal.SIGKILL)
    return parity(prompts, completions)
"""
    )
    return world


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """Eight problems of the embedded model under three caches: one that keeps all, one that need not drop, one that harms."""
    out = tmp_path_factory.mktemp("eval") / "out"
    evaluate("tiny", "--benchmarks", "arithmetic", "--compare", "full,rkv@300,random@40", "--problems", "8",
             "--samples-per-prompt", "2", "--max-tokens", "168", "--mismatch", "--slots", "16", "--out", out,
             "--json", out.parent / "copy.json")  # fmt: skip
    return out, {row["setting"]: row for row in json.loads((out / "results.json").read_text())["results"]}


@pytest.mark.slow
def test_scores_are_those_of_the_samples(tiny_run):
    out, found = tiny_run
    assert list(found) == ["full", "rkv@300", "random@40"]
    for setting, row in found.items():
        mine = [sample for sample in rows(out) if sample["setting"] == setting]
        assert len(mine) == 16 and row["problems"] == 8 and row["samples_per_prompt"] == 2
        rewards = [sample["reward"] for sample in mine]
        assert row["pass@1"]["mean"] == pytest.approx(sum(rewards) / 16)
        either = [max(rewards[start : start + 2]) for start in range(0, 16, 2)]
        assert row["pass@k"]["2"]["mean"] == pytest.approx(sum(either) / 8)
        assert row["mean_tokens"] == pytest.approx(sum(sample["tokens"] for sample in mine) / 16)
        assert row["truncated"] == sum(sample["finish"] != "stop" for sample in mine) / 16
    assert json.loads((out.parent / "copy.json").read_text()) == json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_every_cache_gets_the_same_seeds(tiny_run):
    """A budget that nothing reaches changes nothing, and the difference is paired."""
    out, found = tiny_run
    texts = {name: [row["text"] for row in rows(out) if row["setting"] == name] for name in found}
    assert texts["full"] == texts["rkv@300"] != texts["random@40"]
    assert found["rkv@300"]["difference"]["mean"] == 0 and "difference" not in found["full"]
    gap = found["random@40"]["difference"]
    assert gap["against"] == "full" and gap["low"] <= gap["mean"] <= gap["high"] < 0
    assert gap["mean"] == pytest.approx(found["random@40"]["pass@1"]["mean"] - found["full"]["pass@1"]["mean"])


@pytest.mark.slow
def test_the_mismatch_is_noise_without_evictions_and_grows_with_them(tiny_run):
    _, found = tiny_run
    for name in ("full", "rkv@300"):
        mismatch = found[name]["mismatch"]
        assert mismatch["rejection_rate"] == 0 and abs(mismatch["mismatch_k1"]) < 1e-5 and mismatch["ess"] > 0.9999
        assert found[name]["token_savings"] == 0
    harmed = found["random@40"]["mismatch"]
    assert harmed["mismatch_k3"] > 0.01 and harmed["rejection_rate"] > 0 and harmed["xi_min"] < 1e-4
    assert found["random@40"]["token_savings"] > 0.3
    assert all(row["mismatch"]["engine_noise"] < 1e-4 for row in found.values())


def test_a_killed_evaluation_goes_on_where_it_was(eval_world, tmp_path, capsys):
    flags = ["--slots", "2", "--samples-per-prompt", "2", "--mismatch"]
    broken = list(map(str, arguments(eval_world, tmp_path / "broken", *flags, reward="kills_once")))
    killed = Command(["eval", *broken])
    assert killed.end()[0] == -signal.SIGKILL
    before = rows(tmp_path / "broken")
    assert 0 < len(before) < 16
    with (tmp_path / "broken/samples.jsonl").open("a") as file:
        file.write('{"benchmark": "problems", "torn')
    (eval_world / "graded").write_text("")
    evaluate(*broken)
    graded = (eval_world / "graded").read_text().splitlines()
    assert len(graded) == 32 - len(before)  # what was done is not done again
    whole = [*flags, "--slots", "16"]  # all of it at once: a rollout's seed is its own, in whatever chunk
    evaluate(*arguments(eval_world, tmp_path / "whole", *whole))
    one, two = ([row | {"noise": 0} for row in rows(tmp_path / name)] for name in ("broken", "whole"))
    assert one == two
    one, two = (json.loads((tmp_path / name / "results.json").read_text())["results"] for name in ("broken", "whole"))
    for ours, theirs in zip(one, two, strict=True):
        for key in ("pass@1", "pass@k", "difference", "tokens", "kept_tokens", "dense_tokens", "no_verdict", "compactions"):
            assert ours.get(key) == theirs.get(key), key
        assert ours["mismatch"] == pytest.approx(theirs["mismatch"], rel=1e-2, abs=1e-4)
    (eval_world / "graded").write_text("")
    capsys.readouterr()
    evaluate(*broken)
    assert "The evaluation in " in capsys.readouterr().out and not (eval_world / "graded").read_text()


def test_ctrl_c_leaves_what_is_done(eval_world, tmp_path):
    flags = arguments(eval_world, tmp_path / "out", "--slots", "2", reward="interrupts_once")
    code, text = Command(["eval", *map(str, flags)]).end()
    assert code == 130 and ": run the same command again to continue." in text and text.endswith("sparse-rl: stopped.\n")
    before = rows(tmp_path / "out")
    evaluate(*flags)
    assert 0 < len(before) < 16 and rows(tmp_path / "out")[: len(before)] == before and len(rows(tmp_path / "out")) == 16


def test_a_full_disk_ends_in_a_sentence_and_costs_one_chunk(eval_world, tmp_path):
    flags = arguments(eval_world, tmp_path / "out", "--slots", "2")
    code, text = Command(["eval", *map(str, flags)], file_bytes=1500).end()
    assert code == 2 and "cannot be written (File too large): raise the file size limit (ulimit -f) and run the same" in text
    evaluate(*flags)
    evaluate(*arguments(eval_world, tmp_path / "whole", "--slots", "2"))
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")


def test_a_terminal_shows_a_bar_with_the_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with EvalProgress(console) as watch:
        watch.add_rollouts(10)
        watch.restart()
        watch.set_status("gsm8k, rkv@512")
        watch.sampled(Progress(3, 5, 1200, 2.0, {}, []))
        watch.bar.refresh()
        watch.chunk("gsm8k, rkv@512", 5, 600.0)
        watch.bar.refresh()
    text = console.file.getvalue()
    for words in ("gsm8k, rkv@512", "3/10", "5/10", "600 tokens/s", "left"):
        assert words in text, words


def test_another_question_does_not_mix_with_what_is_there(eval_world, tmp_path, capsys):
    out = tmp_path / "out"
    evaluate(*arguments(eval_world, out))
    before = rows(out)
    for flag, value, sentence in [
        ("--seed", "1", "seed is 1 now but was 0"),
        ("--temperature", "0.5", "temperature is 0.5 now but was 0.8"),
        ("--samples-per-prompt", "2", "samples_per_prompt of problems is 2 now but was 1"),
        ("--problems", "4", "problems of problems is 4 now but was 8"),
        ("--kv.sinks", "2", "sinks of random@20+4 is 2 now but was 4"),
        ("--max-tokens", "20", "max_tokens of problems is 20 now but was 24"),
    ]:
        assert refused(capsys, "eval", *map(str, arguments(eval_world, out, flag, value))).startswith(sentence)
    rewards = eval_world / "eval_rewards.py"
    text = rewards.read_text()
    rewards.write_text(text + "# graded otherwise")
    assert refused(capsys, "eval", *map(str, arguments(eval_world, out))).startswith("reward_contents of problems is ")
    rewards.write_text(text)
    assert rows(out) == before
    evaluate(*arguments(eval_world, out, "--compare", "full,random@20+4,streaming@20+4"))  # one more is no other question
    assert rows(out)[: len(before)] == before and len(rows(out)) == len(before) + 8
    before, files = rows(out), sorted(file.name for file in out.iterdir())
    refused(capsys, "eval", *map(str, arguments(eval_world, out, "--overwrite", reward="nope")))  # it could not start
    assert rows(out) == before and sorted(file.name for file in out.iterdir()) == files
    evaluate(*arguments(eval_world, out, "--seed", "1", "--overwrite"))
    assert len(rows(out)) == 16 and rows(out) != before and not (out / ".replaced").exists()


def test_tables_and_rows_for_a_paper(eval_world, tmp_path, capsys):
    second = tmp_path / "second.jsonl"
    second.write_text((eval_world / "problems.jsonl").read_text())
    benchmarks = f"{eval_world / 'problems.jsonl'},{second}"
    evaluate(*arguments(eval_world, tmp_path / "out", "--benchmarks", benchmarks, "--rows", "--problems", "4"))
    text = capsys.readouterr().out
    for words in ("problems: 4 problems, Pass@1", "against full", "All benchmarks", "average", "tokens/s", "left"):
        assert words in text, words
    paper = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert [line.count("&") for line in paper] == [3, 3, 3] and paper[1].startswith("full & $") and "}_{-" in paper[1]


def test_rewards_that_are_no_shares_and_missing_verdicts(eval_world, tmp_path, capsys):
    evaluate(*arguments(eval_world, tmp_path / "length", "--compare", "full", reward="length"))
    row = json.loads((tmp_path / "length/results.json").read_text())["results"][0]
    assert row["pass@k"] == {} and row["pass@1"]["mean"] > 1
    evaluate(*arguments(eval_world, tmp_path / "some", "--compare", "full", reward="some"))
    row = json.loads((tmp_path / "some/results.json").read_text())["results"][0]
    assert (row["problems"], row["no_verdict"], row["pass@1"]["mean"]) == (7, 1, 1.0)
    assert "Pass@1 excludes 1 rollout without a verdict" in capsys.readouterr().out


def test_a_model_is_compared_under_the_cache_it_was_trained_with(eval_world, tmp_path):
    kv = KV(policy="streaming", budget=20, interval=4, window=4, protect_prompt=False)
    file = eval_world / "model/sparse_rl.json"
    file.write_text(json.dumps({"kv": kv.model_dump()}))
    try:
        flags = arguments(eval_world, tmp_path / "out", "--problems", "2")
        at = flags.index("--compare")
        evaluate(*flags[:at], *flags[at + 2 :])
    finally:
        file.unlink()
    assert [row["setting"] for row in rows(tmp_path / "out")] == ["full"] * 2 + ["streaming@20+4"] * 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--pass-at", "1,8"], "pass@8 needs 8 samples per problem, but problems has 1: lower --pass-at or set"),
        (["--pass-at", "many"], "--pass-at many is not a list of integers. Example: 1,8,32."),
        (["--compare", "rkw@64"], "Unknown KV policy 'rkw' (did you mean 'rkv'?)"),
        (["--benchmarks", "gsm9k"], "No task or file is named gsm9k: did you mean gsm8k?"),
        (["--benchmarks", "gsm8k", "--data.dir", "nowhere"], "data.dir = nowhere is not a folder"),
        (["--max-tokens", "300"], "Problem 1 of "),
        (["--samples-per-prompt", "0"], "argument --samples-per-prompt: 0 is not an integer of at least 1"),
        (["--json", "nowhere/eval.json"], "argument --json: the folder of nowhere/eval.json does not exist: create it first"),
        (["--temperature", "-1"], "sampling.temperature = -1.0 is invalid"),
        (["--kv.budgett", "8"], "unknown argument --kv.budgett: did you mean --kv.budget?"),
    ],
)
def test_mistakes_end_in_one_sentence_and_leave_nothing(eval_world, tmp_path, capsys, flags, sentence):
    assert sentence in refused(capsys, "eval", *map(str, arguments(eval_world, tmp_path / "out", *flags)))
    assert not (tmp_path / "out").exists()


def test_data_without_answers_are_refused_before_anything_is_sampled(eval_world, tmp_path, capsys):
    problems = tmp_path / "bare.jsonl"
    problems.write_text('{"prompt": "1:22+33=", "level": 3}\n')
    flags = arguments(eval_world, tmp_path / "out", "--benchmarks", problems, "--reward.function", "exact")
    sentence = refused(capsys, "eval", *map(str, flags))
    assert "has no answer column, which reward exact needs (found level): set" in sentence
    assert not (tmp_path / "out").exists()


def test_going_on_cuts_what_is_torn_and_writes_nothing_anew(tmp_path, monkeypatch):
    """A kill or a full disk while the record of what is done was rewritten would lose it."""
    asked = {"seed": 0, "benchmarks": {"a": {}}, "settings": {"full": {}}}
    work = Work(tmp_path / "out")
    with work.opened(asked, overwrite=False):
        work.add("a", "full", EvalChunk([EvalSample(0, 0, 1.0, 3, "stop", False, 1, "x\u2028y")], Cost(tokens=3)), None)
    with work.chunks.open("a") as file:
        file.write('{"benchmark": "a", "torn')
    with work.samples.open("a") as file:
        file.write('{"benchmark": "a", "torn')
    inode = work.chunks.stat().st_ino
    monkeypatch.setattr(Path, "write_text", only_asked(Path.write_text))
    again = Work(tmp_path / "out")
    with again.opened(asked, overwrite=False):
        assert [(sample.problem, sample.text) for sample in again.of("a", "full").samples] == [(0, "x\u2028y")]
        assert again.of("a", "full").cost.tokens == 3
    assert work.chunks.stat().st_ino == inode and work.chunks.read_text().count("\n") == 1
    assert "torn" not in work.chunks.read_text() + work.samples.read_text()


def only_asked(write_text):
    def write(path, text, **options):
        assert "asked.json" in path.name, path
        return write_text(path, text, **options)

    return write


def test_starting_anew_leaves_no_old_figures(tmp_path):
    asked = {"seed": 0, "benchmarks": {}, "settings": {}}
    work = Work(tmp_path / "out")
    with work.opened(asked, overwrite=False):
        (work.path / "results.json").write_text("{}")
        work.written = 1
    with Work(tmp_path / "out").opened(asked | {"seed": 1}, overwrite=True):
        assert not (work.path / "results.json").exists()


def test_a_killed_replacement_costs_no_evaluation(tmp_path, capsys):
    """Killed before its first problem, the old one is back; killed after it, the new one goes on."""
    asked, anew = ({"seed": seed, "benchmarks": {"a": {}}, "settings": {"full": {}}} for seed in (0, 1))
    chunk = EvalChunk([EvalSample(0, 0, 1.0, 3, "stop", False, 1, "x")], Cost(tokens=3))
    work = Work(tmp_path / "out")
    with work.opened(asked, overwrite=False):
        work.add("a", "full", chunk, None)
    for adds in (False, True):
        child = os.fork()
        if not child:
            with Work(work.path).opened(anew, overwrite=True):
                if adds:
                    Work(work.path).add("a", "full", chunk, None)
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        after = Work(work.path)
        with after.opened(anew if adds else asked, overwrite=False):
            assert len(after.of("a", "full").samples) == 1
        assert not [*work.path.glob(".replaced*")]
    assert (
        "A previous --overwrite was killed before it finished a problem: the earlier evaluation is restored in "
        in capsys.readouterr().err
    )


def test_a_folder_that_was_only_locked_is_free(tmp_path):
    (tmp_path / "lock").touch()
    with Work(tmp_path).opened({"benchmarks": {}, "settings": {}}, overwrite=False):
        assert (tmp_path / "asked.json").exists()


def test_a_folder_of_something_else_is_left_alone(eval_world, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    sentence = refused(capsys, "eval", *map(str, arguments(eval_world, tmp_path)))
    assert sentence == f"{tmp_path} exists and is not an evaluation folder: set another --out."
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_help_comes_without_torch():
    code = "import sys; from sparse_rl.cli import build_parser; build_parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_that_are_a_link_to_themselves_are_refused_in_a_sentence(eval_world, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(Path(sparse_rl.__file__).parent / "models/tiny", model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("model.safetensors")
    told = refused(capsys, "eval", str(model), "--benchmarks", "arithmetic", "--problems", "1", "--out", str(tmp_path / "out"))
    assert "model.safetensors is damaged" in told
