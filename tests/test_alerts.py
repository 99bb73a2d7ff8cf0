"""Alerts: each begins on what it is for and is told once, a healthy run has none, and what is turned off stays off."""

import gzip
import io
import json
import statistics
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from small_runs import metrics, refused, train
from sparse_rl.cli import build_parser
from sparse_rl.config import KV, AlertsConfig, Config, from_flags, to_toml
from sparse_rl.monitor.alerts import check
from sparse_rl.monitor.ratios import BINS, HIGH, LOW, count
from sparse_rl.monitor.rules import RULES
from sparse_rl.train.terminal import RunTerminal

METHODS = json.loads((Path(__file__).parents[1] / "benchmarks/results/methods.json").read_text())["runs"]
"""18 real runs of 20 steps on the embedded task, at a budget that hurts: every metric of every step."""
DENSE = next(run["steps"] for run in METHODS if run["arm"] == "dense")

TROUBLE = {
    "reward": {"reward/mean": 0.05},
    "entropy": {"policy/entropy": 0.001},
    "repetition": {"response/repetition": 0.5},
    "truncated": {"response/truncated": 0.6},
    "length": {"response/mean_tokens": 20.0},
    "grad_norm": {"policy/grad_norm": 30.0},
    "xi_p05": {"sparse/xi_p05": 0.5},
    "rejected": {"sparse/wasted_tokens": 0.7},
    "zero_std_groups": {"reward/zero_std_groups": 1.0},
    "no_verdict": {"reward/no_verdict": 2.0, "reward/timeouts": 2.0, "reward/errors": 2.0},
    "no_update": {"policy/skipped_updates": 1.0, "policy/loss": float("nan")},
}
"""What turns a healthy row into one that its alert is for."""


def rows(*parts):
    """Rows of a healthy run, numbered from 1: of each (number, change) so many, changed so."""
    changes = [change for number, change in parts for _ in range(number)]
    return [{**DENSE[1], **change, "step": step} for step, change in enumerate(changes, 1)]


# When they begin, and when not


def test_every_alert_has_a_trouble_and_a_limit():
    assert {*TROUBLE, "held_out"} == RULES.keys() == {*AlertsConfig.model_fields, "no_update"} - {"steps"}


@pytest.mark.parametrize("name", TROUBLE)
def test_it_begins_once_ends_and_may_begin_again(name):
    """After three steps of trouble, with the numbers and a remedy; two steps are none, and a good one between does not end it."""
    bad, good = TROUBLE[name], {}
    story = rows((10, good), (2, bad), (1, good), (4, bad), (1, good), (2, bad), (3, good), (3, bad))
    first, again = check(story, AlertsConfig())
    assert (first.name, first.step, first.ended) == (name, 16, 23) and (again.name, again.step, again.ended) == (
        name,
        26,
        None,
    )
    assert first.remedy and "  " not in first.sentence + first.remedy and "\n" not in first.sentence + first.remedy
    assert not (first.sentence + first.remedy).endswith(".")
    for length in range(len(story)):  # told step by step it is the same
        assert [alert.step for alert in check(story[:length], AlertsConfig())] == [step for step in (16, 26) if step <= length]


@pytest.mark.parametrize("name", sorted(AlertsConfig.model_fields.keys() - {"steps", "held_out"}))
def test_a_limit_of_none_turns_it_off(name):
    story = rows((10, {}), (9, TROUBLE[name]))
    for word in (None, "none", "null"):
        assert [alert.name for alert in check(story, AlertsConfig(**{name: word}))] == []
    assert [alert.name for alert in check(story, AlertsConfig(steps=5))] == [name]


def test_what_is_turned_off_stays_off_in_the_stored_configuration():
    flags = ["train", "--alerts.xi-p05", "none", "--alerts.rejected", "null", "--alerts.entropy", "0.5"]
    config = from_flags(build_parser().parse_args(flags), Config)
    assert (config.alerts.xi_p05, config.alerts.rejected, config.alerts.entropy) == ("none", "none", 0.5)
    assert Config(**tomllib.loads(to_toml(config))) == config


def test_a_limit_that_makes_no_sense_is_refused(capsys):
    assert "alerts.xi_p05 = '2' is invalid: input should be less" in refused(
        capsys, "train", "--alerts.xi-p05", "2", "--dry-run"
    )
    assert "did you mean --alerts.xi-p05?" in refused(capsys, "train", "--alerts.xi-p5", "1", "--dry-run")


def test_the_numbers_and_the_limit_are_in_the_sentence():
    told = {name: check(rows((10, {}), (3, change)), AlertsConfig())[0].sentence for name, change in TROUBLE.items()}
    assert "0.50, initially 1.00 (limit 0.6)" in told["xi_p05"]
    assert (
        "policy/grad_norm is 30, " in told["grad_norm"]
        and "times the median of the first 10 steps (limit 2.5)" in told["grad_norm"]
    )
    assert "from 0% to 60% (limit 50% more): answers no longer end within rollout.max_tokens" in told["truncated"]
    assert "6 of 48 rollouts" in told["no_verdict"] and "2 None, 2 timeouts, 2 errors" in told["no_verdict"]
    assert "sparse/wasted_tokens 70% (limit 40%)" in told["rejected"]


@pytest.mark.parametrize(
    ("kv", "remedy"),
    [
        (KV(), "raise kv.budget"),
        (KV(budget="auto"), "lower kv.target_rejected or rollout.max_tokens"),
        (KV(policy="full", dtype="4bit"), "use more bits (kv.dtype)"),
    ],
)
def test_remedies_suit_the_cache(kv, remedy):
    """A budget that sets itself is not raised by hand, and a cache that keeps everything has none."""
    told = check(rows((10, {}), (3, TROUBLE["rejected"])), AlertsConfig(), kv)
    assert [alert.remedy for alert in told] == [f"{remedy} or use another kv.policy"]
    for rule in RULES.values():
        assert "kv.budget" not in rule.remedy + rule.after_fall


def test_answers_that_are_cut_off_count_sooner_after_a_fall():
    """From the best reward, wherever the first was; and a limit of one's own is never undercut."""

    def told(rose, *rewards, **limits):
        story = rows((5, {"reward/mean": 0.1}), *((5, {"reward/mean": each, "response/truncated": rose}) for each in rewards))
        return [(alert.step, alert.sentence) for alert in check(story, AlertsConfig(**limits)) if alert.name == "truncated"]

    assert told(0.4, 0.9, 0.8) == []
    ((step, sentence),) = told(0.4, 0.9, 0.15)  # which is more than at first
    assert (
        step == 13
        and "to 40% (limit 20% more) while reward/mean fell from its best value 0.9 to 0.15: rollouts loop" in sentence
    )
    assert [step for step, _ in told(0.6, 0.9)] == [8] and told(0.6, 0.9, truncated=0.7) == []
    assert told(0.6, 0.9, 0.15, truncated=0.7) == []


def test_one_evaluation_clearly_below_the_best_begins_and_one_ends_an_alert():
    """By interval and by the limit; steps without an evaluation do not count, and each benchmark has its own best score."""

    def scores(mean, error, name="test"):
        key = f"eval/{name}/pass@1"
        return {key: mean, f"{key}_low": mean - error, f"{key}_high": mean + error}

    def told(*evaluations, **limits):
        story = rows(*((number, change) for each in evaluations for number, change in ((1, each), (4, {}))))
        found = [alert for alert in check(story, AlertsConfig(**limits)) if alert.name == "held_out"]
        return [(alert.step, alert.ended) for alert in found]

    start = {**scores(0.3, 0.02), **scores(0.6, 0.02, "other")}
    assert told(start, scores(0.4, 0.02), scores(0.3, 0.02), scores(0.39, 0.02)) == [(11, 16)]
    assert told(start, scores(0.2, 0.02)) == [(6, None)] and told(start, scores(0.4, 0.02, "other")) == [(6, None)]
    assert told(start, scores(0.2, 0.09)) == told(start, scores(0.27, 0.001)) == []
    assert told(scores(-1.0, 0.01), scores(-1.05, 0.01)) == [] and told(scores(-1.0, 0.01), scores(-1.3, 0.01)) == [(6, None)]
    assert told(start, scores(0.2, 0.02), held_out="none") == told(start, scores(0.2, 0.02), held_out=0.5) == []


def test_of_real_runs_those_that_lost_what_they_could_do_are_told_by_the_held_out_score():
    paths = sorted(EVIDENCE_FOLDER.glob("*/raw/*.jsonl.gz"))
    begun = {}
    for path in paths:
        with gzip.open(path, "rt") as file:
            alerts = check([json.loads(line) for line in file], AlertsConfig())
        begun |= {(path.parents[1].name, path.name.split(".")[0]): each.step for each in alerts if each.name == "held_out"}
    lost = {("a-collapse", f"naive{run}"): 60 for run in ("-1", "-4-0", "-4-1")}
    long = {("l-long", f"naive-{seed}"): 10 for seed in range(3)}
    assert begun == {**lost, **long} and len(paths) > 70


def test_equal_rewards_want_another_remedy_after_a_fall():
    """Problems that were solved before are neither too hard nor badly graded; one lucky answer of 48 is no such sign."""
    equal = {"reward/zero_std_groups": 1.0, "reward/mean": 0.0, "reward/std": 0.0}
    lucky = {"reward/mean": 1 / 48, "reward/std": 0.14}
    remedies = [
        alert.remedy
        for first in ({}, equal, lucky)
        for alert in check(rows((1, first), (3, equal)), AlertsConfig())
        if alert.name == "zero_std_groups"
    ]
    assert ["problems were solved before" in each for each in remedies] == [True, False, False]
    assert ["easier or harder problems" in each for each in remedies] == [False, True, True]


HEALTHY = {
    ("dense", 0),
    ("dense", 1),
    ("dense", 2),
    ("smd", 0),
    ("smd", 1),
    ("on_policy_sparse", 1),
    ("sparse_rl released", 1),
}
"""Those that learned steadily, also at this budget."""


@pytest.mark.parametrize("run", METHODS, ids=lambda run: f"{run['arm']}-{run['seed']}")
def test_a_run_that_learns_has_none(run):
    if (run["arm"], run["seed"]) in HEALTHY:
        assert check(run["steps"], AlertsConfig()) == []
    assert "xi_p05" not in names(check(run["steps"], AlertsConfig()))  # this model's hardly moves


def test_answers_of_these_runs_do_not_shrink_and_are_cut_off_where_they_fell():
    presets = json.loads((Path(__file__).parents[1] / "benchmarks/results/presets.json").read_text())["runs"]
    assert len(METHODS + presets) == 39
    told = {f"{run['arm']}-{run['seed']}": names(check(run["steps"], AlertsConfig())) for run in METHODS + presets}
    assert not any("length" in each for each in told.values())
    assert {run for run, each in told.items() if "truncated" in each} == {"smd-2", "on_policy_sparse-2", "tis-0"}


def test_runs_that_collapsed_say_so():
    """Those whose reward stayed near 0. (`naive` with seed 2 fell in its last two steps: too late for three in a row.)"""
    held = {(run["arm"], run["seed"]) for run in METHODS for alert in check(run["steps"], AlertsConfig())
            if alert.name == "reward" and alert.ended is None}  # fmt: skip
    assert held == {("sparse_rl paper", 2), ("smd", 2), ("on_policy_sparse", 2)}


EVIDENCE_FOLDER = Path(__file__).parents[1] / "experiments/evidence"
EVIDENCE = [
    path
    for question in ("pilot", "a-collapse", "a-corrections", "b-budget", "d-samples")
    for path in sorted((EVIDENCE_FOLDER / question / "raw").glob("*.jsonl.gz"))
]


@pytest.mark.parametrize("path", EVIDENCE, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_of_real_runs_the_gradient_tells_naive_ones_apart(path):
    """What experiments/RESULTS.md says of them: of those with a correction, and dense ones, one is warned of, and late."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    alerts = check(rows, AlertsConfig())
    told = [alert.step for alert in alerts if alert.name == "grad_norm"]
    late = path.name.startswith("snapkv-128-1")  # why is not known
    assert bool(told) == (late or path.name.startswith("naive")) and all(
        30 < step < 44 or (late and step == 54) for step in told
    )
    norms = [row["policy/grad_norm"] for row in rows if "policy/grad_norm" in row]
    held = max(map(min, norms, norms[1:], norms[2:])) / statistics.median(norms[:10])
    assert held > (2.9 if late else 4.7) if told else held < 2.35 and max(norms) < 10 * statistics.median(norms[:10])
    assert ("xi_p05" in names(alerts)) == path.name.startswith(("naive-1", "released-0", "rkv-96", "rkv-128", "snapkv-128"))
    assert "length" not in names(alerts) and ("truncated" in names(alerts)) == path.name.startswith("naive-4-0")
    lasting = [alert for alert in alerts if alert.name == "rejected" and alert.step == 3]
    assert bool(lasting) == path.name.startswith(("rkv-96", "snapkv-128"))
    assert ("rejected" in names(alerts)) == (path.name.removesuffix(".jsonl.gz") in REJECTING)


LONG = sorted((EVIDENCE_FOLDER / "l-long" / "raw").glob("*.jsonl.gz"))


UNCORRECTED = [
    path
    for path in (*EVIDENCE, *LONG)
    if path.name.startswith(("naive", "dense", "full")) and not path.name.startswith("dense-4bit")
]


@pytest.mark.parametrize("path", UNCORRECTED, ids=lambda path: f"{path.parents[1].name} {path.name.removesuffix('.jsonl.gz')}")
def test_without_a_correction_the_mismatch_tells_sparse_runs_from_dense_ones(path):
    """The limit of an uncorrected run fires at once in every naive run, and never in a dense one."""
    method = "naive" if path.name.startswith("naive") else "dense"
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    told = [alert.step for alert in check(rows, Config(method=method).limits) if alert.name == "xi_p05"]
    assert told[:1] == ([3] if method == "naive" else [])


@pytest.mark.parametrize("path", LONG, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_answers_that_outgrow_a_fixed_budget_are_told_by_the_rise_of_rejections(path):
    """In the run with 512 recent tokens, rejections rose from 4 to 27 %: below the limit, far above the first steps."""
    with gzip.open(path, "rt") as file:
        told = [alert for alert in check([json.loads(line) for line in file], AlertsConfig()) if alert.name == "rejected"]
    assert [alert.step for alert in told] == ([26] if path.name.startswith("streaming") else [])
    assert all("usually 4% in the first 10 steps (limit 15% more)" in alert.sentence for alert in told)


def test_a_rise_of_rejections_counts_from_the_tenth_step():
    start = rows((10, {"sparse/rejection_rate": 0.02}))
    for rate, told in ((0.16, []), (0.18, [13]), (0.39, [13]), (0.41, [13])):
        story = [*start, *(row | {"step": row["step"] + 10} for row in rows((3, {"sparse/rejection_rate": rate})))]
        assert [alert.step for alert in check(story, AlertsConfig()) if alert.name == "rejected"] == told
        assert not [alert for alert in check(story, AlertsConfig(rejected="none")) if alert.name == "rejected"]
        assert not [alert for alert in check(story[5:], AlertsConfig()) if alert.name == "rejected" and rate < 0.4]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"method": "naive"}, 0.86),
        ({"method": "sparse_rl"}, 0.6),
        ({"method": "sparse_rl", "correction": {"preset": "none"}}, 0.86),
        ({"method": "sparse_rl", "correction": {"preset": "reject_only"}}, 0.6),
        ({"method": "smd"}, 0.6),
        ({"method": "naive", "alerts": {"xi_p05": 0.7}}, 0.7),
        ({"method": "naive", "alerts": {"xi_p05": "none"}}, "none"),
    ],
)
def test_the_limit_of_the_mismatch_depends_on_the_correction(options, limit):
    assert Config(**options).limits.xi_p05 == limit


REJECTING = {"rkv-96-0", "snapkv-128-0", "rkv-128-0", "paper-4-0", "paper-4-2", "paper-guard-0"}
REJECTING |= {"reject_only-0", "reject_only-1", "released-1", "rkv-96-1", "rkv-128-1", "snapkv-128-1", "paper-guard-1"}


ARTICLES = [
    path for question in ("g-graded", "g-length") for path in sorted((EVIDENCE_FOLDER / question / "raw").glob("*.jsonl.gz"))
]


@pytest.mark.parametrize("path", ARTICLES, ids=lambda path: f"{path.parents[1].name} {path.name.removesuffix('.jsonl.gz')}")
def test_of_another_task_the_gradients_alarms_go_away(path):
    """As experiments/RESULTS.md says: where nothing fell, none lasted, and a reward that was met by hardly an answer, or by one without
    an end, is told of in every run."""
    with gzip.open(path, "rt") as file:
        alerts = check([json.loads(line) for line in file], AlertsConfig())
    begun = {name: [alert.step for alert in alerts if alert.name == name] for name in RULES}
    spans = [alert.ended and alert.ended - alert.step for alert in alerts if alert.name == "grad_norm"]
    assert all(span in range(3, 8) for span in spans)
    assert bool(spans) == (f"{path.parents[1].name} {path.name.split('.')[0]}" in ALARMED)
    short = path.parents[1].name == "g-graded"
    assert bool(begun["length"]) == short and all(9 <= step <= 30 for step in begun["length"])
    assert bool(begun["truncated"]) != short and all(9 <= step <= 19 for step in begun["truncated"])
    assert bool(begun["xi_p05"]) == path.name.startswith("paper-protected" if short else ("naive", "paper"))
    assert bool(begun["rejected"]) == (not short and path.name.startswith("paper-protected"))


ALARMED = {"g-graded dense-0", "g-graded dense-1", "g-graded paper-protected-1", "g-length naive-0"}


@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (1000, 0), (1, -0.354), (1, -5)])
def test_a_fall_counts_beyond_chance_on_any_scale(scale, shift):
    """Means near 0, negative ones and huge ones: the noise of a run that learns is no fall, and a fall is one."""
    for run in METHODS:
        if run["arm"] not in ("dense", "sparse_rl released"):
            continue
        story = [
            {**row, "reward/mean": scale * row["reward/mean"] + shift, "reward/std": scale * row["reward/std"]}
            for row in run["steps"][1:]
        ]
        assert "reward" not in names(check(story, AlertsConfig()))
        fallen = [{**row, "reward/mean": -9.0 * scale + shift} for row in story[:3]]
        assert "reward" in names(check([*story, *fallen], AlertsConfig()))


def test_a_reward_that_begins_at_nothing_is_judged_by_the_noise_that_came_later():
    """At first nobody solves anything, then 2 or 3 of 48 now and then: the mean halves by chance."""
    lucky, poor = {"reward/mean": 3 / 48, "reward/std": 0.24}, {"reward/mean": 1 / 48, "reward/std": 0.14}
    assert check(rows((2, {"reward/mean": 0.0, "reward/std": 0.0}), (4, lucky), (5, poor)), AlertsConfig()) == []


def test_numbers_out_of_this_world_break_no_run():
    odd = {"policy/entropy": -1e-7, "perf/rollout_s": 1e299, "perf/rollout_tokens_per_s": 1e299}
    check(rows((1, {"policy/entropy": 0.0}), (4, odd)), AlertsConfig())


def names(alerts):
    return [alert.name for alert in alerts]


def test_rows_that_are_damaged_say_nothing():
    """A value that is missing, text or not finite is none; a row without a step is none."""
    damaged = [{}, {"step": "<script>"}, {"step": 0, "eval/x/pass@1": 0.5}, {"reward/mean": 1.0}]
    odd = [{"step": step, "policy/entropy": value, "sparse/xi_p05": value, "reward/mean": value, "response/truncated": value}
           for step, value in enumerate([None, "[red]", float("nan"), float("inf"), [], {}, 10**400])]  # fmt: skip
    assert check([*damaged, *odd], AlertsConfig(steps=1)) == []
    story = rows((1, {}), (9, TROUBLE["xi_p05"]))
    mixed = [row for pair in zip(story, [*damaged, *odd][: len(story)], strict=True) for row in reversed(pair)]
    assert [(alert.name, alert.step) for alert in check(mixed, AlertsConfig())] == [("xi_p05", 4)]


def test_it_loads_no_torch():
    code = "import sys, sparse_rl.monitor.alerts, sparse_rl.monitor.ratios; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# What a person sees


def test_alerts_are_told_when_they_begin_and_listed_at_the_end(world, tmp_path, capsys):
    """In a run, and again by one that continues it; what is written is the same with and without."""
    flags = ["--method", "dense", "--rollout.max-tokens", "4", "--steps", "4"]
    train(world, tmp_path / "run", *flags, reward="same")
    out = capsys.readouterr().out
    begins = "alert, step 3: reward/zero_std_groups is 100% (limit 90%)"
    assert out.count(begins) == 1 and out.index("step 3/4 ") < out.index(begins) < out.index("step 4/4 ")
    assert "Alerts of the run:\n  zero_std_groups, step 3 on: reward/zero_std_groups is 100%" in out
    assert not any("alert" in key for row in metrics(tmp_path / "run") for key in row)
    resumed = [*flags[:-1], "5", "--resume"]
    train(world, tmp_path / "run", *resumed, reward="same")
    out = capsys.readouterr().out
    assert out.count(begins) == 1 and out.index(begins) < out.index("step 5/5 ")
    train(
        world, tmp_path / "run", *resumed, "--steps", "6", "--alerts.zero-std-groups", "none", reward="same"
    )  # it may change
    out = capsys.readouterr().out
    assert "alert, step" not in out and "Alerts of" not in out


@pytest.mark.parametrize("terminal", [True, False])
def test_text_drives_neither_the_markup_nor_the_terminal(terminal):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=200, height=30)
    with RunTerminal(Config(steps=9, run_dir="[red]x\x1b[2J"), console) as view:
        view.note("[bold]not markup[/bold] \x1b]0;title\x07")
        view.warn("over \x1b[2J time")
        for row in rows((1, {}), (4, TROUBLE["rejected"])):
            view.step(row["step"], row)
    text = screen.getvalue()
    assert "[bold]not markup[/bold] \\x1b]0;title\\x07" in text and "warning: over \\x1b[2J time" in text
    assert "\x1b[2J" not in text and "\x07" not in text
    assert text.count("alert, step 4: sparse/rejection_rate is 0% and sparse/wasted_tokens 70%") == 1
    assert ("alerts: rejected since step 4" in text) == terminal and "rejected, step 4 on: " in text


# The distribution of xi


def test_counts_are_a_histogram_with_open_ends():
    log_xi = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 6 - 4
    edges = np.linspace(LOW, HIGH, BINS + 1)
    log10 = np.clip(log_xi.double().numpy() / np.log(10), LOW, np.nextafter(HIGH, LOW))
    assert count(log_xi) == np.histogram(log10, edges)[0].tolist() and count(log_xi)[0] > 50
    assert sum(count(log_xi)) == 10_000 and len(edges) == 51
    odd = torch.tensor([float("nan"), float("-inf"), float("inf"), 1e30, -1e30, 0.0])
    found = count(odd)
    assert (found[0], found[-1], found[40]) == (3, 2, 1) and sum(found) == 6


def test_a_run_writes_the_distribution_of_every_step(world, tmp_path):
    train(world, tmp_path / "run", "--log.rollouts-per-step", "9")
    lines = [json.loads(line) for line in (tmp_path / "run/xi.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(line.keys() == {"step", "counts"} for line in lines)
    for line in lines:
        stored = pq.read_table(tmp_path / f"run/rollouts/step-{line['step']}.parquet").to_pylist()
        dense, sampler = (torch.tensor([x for row in stored for x in row[f"{who}_logprobs"]]) for who in ("dense", "sampler"))
        assert line["counts"] == count(dense - sampler)
        assert sum(place > 0 for place in line["counts"]) > 2  # this model's sampler is far off


def test_an_alert_is_what_the_report_expects():
    (alert,) = check(rows((1, {}), (3, TROUBLE["xi_p05"])), AlertsConfig())
    assert {field.name for field in fields(alert)} >= {"step", "name", "sentence", "remedy"}
