"""Runs with kv.budget = auto: the probe, the controller, checkpoints, the report, and what is refused."""

import json
import signal

import pytest

from small_runs import Command, arguments, metrics, one_thread, refused, train
from sparse_rl import KV, Engine, Sampling, UserError
from sparse_rl.cli import main
from sparse_rl.config import Config
from sparse_rl.monitor.budget import Figures, Targets
from sparse_rl.train.budget_probe import ProbeRow, find_budget
from sparse_rl.train.memory import budgets_that_fit
from test_resume import EVERY_STEP, assert_same_run, state_of

AUTO = ["--kv.budget", "auto", "--kv.target-rejected", "0.2", "--rollout.samples-per-prompt", "8", "--alerts.xi-p05", "0.05"]
"""Targets that the random model meets below the longest sequence. Its answers have 24 tokens, its prompts about 8."""


def changes(run):
    return [json.loads(line) for line in (run / "budget.jsonl").read_text().splitlines()]


def row(budget, rejected):
    return ProbeRow(budget, Figures(rejected, 128, 0.9, 100), 0.0, 0, 1, 0.0)


# The probe


@pytest.mark.parametrize("needed", range(1, 8))
def test_the_probe_finds_the_smallest_budget_with_few_measurements(needed):
    budgets = [10, 20, 30, 40, 50, 60]
    found, rows = find_budget(budgets, Targets(0.02), lambda budget: row(budget, 0.5 if budget < 10 * needed else 0.0))
    assert (found.budget if found else None) == (10 * needed if needed < 7 else None)
    assert len(rows) <= 3 and [each.budget for each in rows] == sorted({each.budget for each in rows})
    assert found is not None or rows[-1].budget == 60


def test_budgets_end_at_the_longest_sequence():
    config = Config(kv={"budget": "auto", "window": 4, "sinks": 4}, rollout={"max_tokens": 100})
    assert budgets_that_fit(config, None, 50)[-1] == 150 and budgets_that_fit(config, None, 50)[0] == 16
    protected = Config(kv={"budget": "auto", "protect_prompt": True}, rollout={"max_tokens": 100})
    assert budgets_that_fit(protected, None, 50)[-1] == 100


# The engine


def test_a_resized_engine_is_a_new_engine(model):
    """Same rollouts, same bytes, statistics kept."""
    prompts, sampling = [list(range(3, 40)), [7, 8, 9]], Sampling(max_tokens=40, stop=())
    options = {"policy": "triattention", "interval": 8, "window": 4, "dtype": "8bit", "protect_prompt": True}
    engine, fresh = (Engine(model, KV(budget=budget, **options), slots=slots) for budget, slots in ((24, 2), (40, 3)))
    engine.calibrate(prompts, 100)
    engine.generate(prompts, 2, sampling)
    engine.resize(40, 3)
    fresh.load_statistics(engine.statistics)
    left, right = (each.generate(prompts, 2, sampling) for each in (engine, fresh))
    assert [each.response for each in left] == [each.response for each in right]
    assert engine.cache.kv_bytes == fresh.cache.kv_bytes and engine.kv == fresh.kv


# Runs


def test_a_run_finds_its_budget_and_says_so(world, tmp_path, capsys):
    train(world, tmp_path / "run", *AUTO, "--steps", "1")
    out = capsys.readouterr().out
    found = int(metrics(tmp_path / "run")[-1]["kv/budget"])
    assert "the smallest budget with at most 20.0% rejected" in out and "chosen" in out and "missed" in out
    assert f"kv.budget is {found} from step 1 on, found by the probe:" in out
    assert changes(tmp_path / "run")[0]["after"] == found and changes(tmp_path / "run")[0]["step"] == 0
    stored = json.loads((tmp_path / "run/model/sparse_rl.json").read_text())["kv"]
    assert isinstance(stored["budget"], int) and "target_rejected" not in stored
    with one_thread():
        main(["export", str(tmp_path / "run"), str(tmp_path / "exported")])
    assert json.loads((tmp_path / "exported/sparse_rl.json").read_text())["kv"] == stored


def test_the_budget_follows_the_figures(world, tmp_path, capsys):
    """A learning rate that destroys the model changes what is rejected: the budget moves, and every change is in the log, in
    the checkpoint and in the metrics."""
    run = tmp_path / "run"
    train(world, run, *AUTO, *EVERY_STEP, "--steps", "8", "--optimizer.lr", "0.05", "--kv.target-rejected", "0.3")
    rows, log = metrics(run), changes(run)
    assert len(log) > 1 and all(each["reason"] for each in log)
    assert state_of(run, 8)[1]["budget"]["changes"] == log
    by_step = {each["step"]: int(each["kv/budget"]) for each in rows if "kv/budget" in each}
    for each in log:
        if each["step"] < 8:
            assert by_step[each["step"] + 1] == each["after"]
    rebuilt = [each["step"] for each in rows if "perf/rebuild_s" in each]
    assert rebuilt == [each["step"] for each in log[1:] if each["before"] != each["after"]]
    bytes_by_budget = {int(each["kv/budget"]): each["kv/peak_bytes"] for each in rows if "kv/budget" in each}
    slot = {each / (budget + 4) for budget, each in bytes_by_budget.items()}
    assert len(slot) == 1  # the bytes are those of the budget


def test_a_killed_run_with_auto_resumes_to_the_same_weights(world, tmp_path):
    flags = [*AUTO, *EVERY_STEP, "--optimizer.lr", "0.05", "--kv.target-rejected", "0.3"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    first = Command(arguments(world, killed, *flags, "--steps", "500"))
    first.read_to("step 3/500")
    first.signal(signal.SIGKILL)
    assert first.end()[0] == -signal.SIGKILL
    steps = int(metrics(killed)[-1]["step"]) + 3
    train(world, killed, *flags, "--steps", str(steps), "--resume")
    train(world, whole, *flags, "--steps", str(steps))
    assert_same_run(whole, killed, steps)
    assert changes(whole) == changes(killed)


# What is refused


def test_contradictions_are_refused_with_the_remedy(world, tmp_path, capsys):
    cases = {
        ("--kv.policy", "full"): "kv.budget = auto and kv.policy = full contradict each other: full evicts nothing.",
        ("--rollout.slots", "4"): "kv.budget = auto and rollout.slots = 4 contradict each other: a larger budget takes",
        ("--kv.target-rejected", "0"): "kv.target_rejected = 0 is invalid: input should be greater than 0.",
    }
    for flags, sentence in cases.items():
        assert refused(capsys, *arguments(world, tmp_path / "run", *AUTO, *flags)).startswith(sentence)
    with pytest.raises(UserError, match="auto works in training only: set a number"):
        KV(budget="auto").capacity  # noqa: B018


def test_targets_that_no_budget_reaches_are_refused_with_the_remedy(world, tmp_path, capsys):
    """Without eviction, quantisation alone misses them."""
    flags = [*AUTO, "--kv.dtype", "4bit", "--kv.target-rejected", "0.001", "--alerts.xi-p05", "0.999"]
    sentence = refused(capsys, *arguments(world, tmp_path / "run", *flags))
    assert sentence.startswith("No budget up to 33 tokens, the longest sequence, has at most 0.1% rejected")
    assert "lower rollout.max_tokens, use another kv.policy, set kv.protect_prompt = true, set kv.dtype = auto" in sentence
