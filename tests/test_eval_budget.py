"""`sparse-rl eval --mismatch` as the probe of kv.budget = auto: the same figures, targets and search."""

import json
import math

import numpy as np
import pytest
import torch

from small_runs import one_thread, refused
from sparse_rl import KV, Engine, Sampling
from sparse_rl.cli import main
from sparse_rl.config import PRESETS, AlertsConfig, CorrectionSpec
from sparse_rl.evaluate import runner
from sparse_rl.evaluate.benchmark import EvalSample
from sparse_rl.evaluate.mismatch import Criteria, replay_samples, summary
from sparse_rl.learner.correction import long_tail
from sparse_rl.monitor.budget import Targets, ladder
from sparse_rl.train import budget_probe
from sparse_rl.world import World


@pytest.mark.parametrize("spec", [PRESETS["paper"], PRESETS["none"], CorrectionSpec(veto=0.1)], ids=["paper", "none", "veto"])
def test_the_probe_and_an_evaluation_have_equal_figures_of_the_same_rollouts(model, monkeypatch, spec):
    """Also if the evaluation stores them in two parts. The judged share is that of its definition."""
    monkeypatch.setattr(budget_probe, "ROLLOUTS", 16)
    kv = KV(policy="streaming", budget=8, interval=4, window=2, sinks=1, protect_prompt=False)
    engine, rollouts = Engine(model, kv, slots=16), []
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *args, **options: rollouts.extend(generate(*args, **options)) or rollouts)
    options = {"tokens_per_pass": 4096, "world": World()}
    sampling = Sampling(
        max_tokens=40, temperature=0.2
    )  # at which a random model is sure, and evictions change what it is sure of
    row = budget_probe.probe_budget(engine, model, [[7, 8, 9], list(range(3, 30))], 8, sampling, spec, **options)
    samples = [
        EvalSample(place, 0, None, len(each.response), each.finish, False, 0, "") for place, each in enumerate(rollouts)
    ]
    log_xi = replay_samples(model, rollouts, samples, spec)
    found = summary([log_xi[:99], log_xi[99:]], samples, spec)
    assert found.figures == row.figures and found.mismatch_k3 == row.k3
    ends = np.cumsum([sample.tokens for sample in samples])
    judged = np.mean([part.min() < math.log(spec.veto or 1e-4) for part in np.split(log_xi, ends[:-1])])
    assert found.figures.rejected == judged and 0 < judged < 1
    assert found.rejection_rate == np.mean([sample.rejected for sample in samples]) == (judged if spec.veto else 0)


@pytest.mark.parametrize(("samples", "prompts", "each"), [(4, 32, 4), (8, 16, 8), (32, 16, 8), (128, 16, 8)])
def test_the_probe_of_large_groups_has_many_prompts(model, samples, prompts, each):
    """With all 128 rollouts of one prompt, the budget would be that of the first problem."""
    asked = [[3 + number] for number in range(40)]
    engine, calls = Engine(model, KV(policy="streaming", budget=8, interval=4, window=2, sinks=1), slots=128), []
    generate = engine.generate
    engine.generate = lambda *args, **options: calls.append(args[:2]) or generate(*args, **options)
    options = {"tokens_per_pass": 4096, "world": World()}
    row = budget_probe.probe_budget(engine, model, asked, samples, Sampling(max_tokens=2), PRESETS["paper"], **options)
    ((sampled, per_prompt),) = calls
    assert (len(set(map(tuple, sampled))), per_prompt) == (prompts, each) and row.figures.rollouts == 128


def test_targets_are_those_of_the_correction_and_the_alerts():
    kv = KV(target_rejected=0.1)
    assert Criteria(PRESETS["paper"], AlertsConfig()).targets(kv) == Targets(0.1, 0.6, "rejected")
    found = Criteria(PRESETS["tis"], AlertsConfig(xi_p05="none")).targets(kv)
    assert found == Targets(0.1, 0.0, "unlikely") and str(found) == "at most 10.0% of rollouts with a xi below 1e-4"


def test_eval_names_the_smallest_budget_within_the_targets(world, tmp_path, capsys):
    """By the same figures as the probe: rejections, and xi in the second half of the longest quarter of the responses."""
    out = tmp_path / "eval"
    flags = ["--compare", "full,rkv@60,rkv@16", "--mismatch", "--max-tokens", "30", "--temperature", "1", "--top-p", "1"]
    flags += ["--reward.function", f"{world / 'rewards.py'}:sums", "--reward.workers", "0", "--out", str(out)]
    with one_thread():
        main(["eval", str(world / "model"), "--benchmarks", str(world / "problems.jsonl"), *flags])
    text = capsys.readouterr().out
    assert "Smallest compared budget with at most 2.0% rejected and xi p05 of long responses at least 0.6: rkv@60." in text
    found = {row["setting"]: row["mismatch"] for row in json.loads((out / "results.json").read_text())["results"]}
    assert found["rkv@60"]["xi_p05_long"] > 0.99 and found["rkv@16"]["xi_p05_long"] < 0.6
    log_xi = torch.from_numpy(np.load(out / "log_xi/2.npy"))
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    parts = log_xi.split([row["tokens"] for row in samples if row["setting"] == "rkv@16"])
    longest = sorted(parts, key=lambda part: -len(part))[:2]
    late = torch.cat([part[len(part) // 2 :] for part in longest]).sort().values.exp()
    assert found["rkv@16"]["xi_p05_long"] == pytest.approx(float(late[math.ceil(0.05 * len(late)) - 1]), rel=1e-5)


@pytest.fixture
def search(world, tmp_path):
    """The command of an evaluation that searches for a budget."""
    flags = ["--mismatch", "--max-tokens", "48", "--temperature", "1", "--top-p", "1", "--reward.workers", "0"]
    flags += ["--reward.function", f"{world / 'rewards.py'}:sums", "--out", str(tmp_path / "eval"), "--kv.sinks", "2"]
    flags += ["--kv.window", "4", "--compare", "full,rkv@auto+4"]
    return ["eval", str(world / "model"), "--benchmarks", str(world / "problems.jsonl"), *flags]


def mismatches(folder):
    return {row["setting"]: row["mismatch"] for row in json.loads((folder / "results.json").read_text())["results"]}


def test_eval_searches_the_smallest_budget_and_continues_after_a_kill(search, tmp_path, capsys, monkeypatch):
    """By the probe's bisection over the probe's budgets. A search that was cut off repeats nothing."""

    def interrupt(*figures):
        raise KeyboardInterrupt

    with one_thread(), monkeypatch.context() as patch:
        patch.setattr(runner, "mismatch_of", interrupt)  # after the first budget
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            main(search)
    assert "run the same command again to continue" in capsys.readouterr().out
    before = (tmp_path / "eval/samples.jsonl").read_text()
    with one_thread():
        main(search)
    text = capsys.readouterr().out
    assert (tmp_path / "eval/samples.jsonl").read_text().startswith(before)
    found, rungs = mismatches(tmp_path / "eval"), ladder(16, 48)
    budgets = {int(name.removeprefix("rkv@").removesuffix("+4")): each for name, each in found.items() if name != "full"}
    assert list(budgets) == sorted(budgets) and set(budgets) <= set(rungs)
    met = {each for each in budgets if budgets[each]["rejection_rate"] <= 0.02 and budgets[each]["xi_p05_long"] >= 0.6}
    missed = budgets.keys() - met
    assert rungs.index(min(met)) == rungs.index(max(missed)) + 1  # neighbours
    assert f"at most 2.0% rejected and xi p05 of long responses at least 0.6: rkv@{min(met)}+4." in text
    stored = json.loads((tmp_path / "eval/results.json").read_text())["asked"]["settings"]
    assert stored[f"rkv@{min(met)}+4"]["budget"] == min(met) and "rkv@auto+4" not in stored
    with one_thread():
        main(search)
    assert "is already complete" in capsys.readouterr().out and mismatches(tmp_path / "eval") == found


def test_eval_takes_the_correction_and_the_target_of_the_tail(search, tmp_path, capsys):
    """Finished samples are of one correction. A target is of the report alone, so another one samples nothing again."""
    few = [*search[:-1], "rkv@16", "--problems", "4", "--kv.target-rejected", "0.3", "--correction.veto"]
    with one_thread():
        main([*few, "0.3"])
        before = (tmp_path / "eval/samples.jsonl").read_text()
        main([*few, "0.3", "--alerts.xi-p05", "none"])
    first, second = capsys.readouterr().out.split("The evaluation in")
    tail = " and xi p05 of long responses at least 0.6"
    assert f"at most 30.0% rejected{tail}" in first and "at most 30.0% rejected" in second and tail not in second
    assert (tmp_path / "eval/samples.jsonl").read_text() == before
    found = mismatches(tmp_path / "eval")["rkv@16"]
    assert (
        found["rejection_rate"] == np.mean([json.loads(line)["rejected"] for line in before.splitlines()]) > found["unlikely"]
    )
    assert "unlikely" in first and "figures" not in found
    sentence = refused(capsys, *few, "0")
    assert sentence.startswith("correction is {'veto': 0.0} now but was {'veto': 0.3} in ")


def test_a_correction_that_rejects_nothing_is_judged_by_unlikely_rollouts(search, tmp_path, capsys):
    with one_thread():
        main([*search[:-1], "rkv@16", "--problems", "2", "--correction.preset", "none"])
    assert "at most 2.0% of rollouts with a xi below 1e-4 and xi p05" in capsys.readouterr().out
    assert mismatches(tmp_path / "eval")["rkv@16"]["rejection_rate"] == 0


def test_eval_goes_on_below_a_budget_that_does_not_fit(search, tmp_path, capsys, monkeypatch):
    sample = runner.run

    def in_little_memory(engine, *args, **options):
        if engine.kv.policy != "full" and engine.kv.budget > 24:
            raise torch.OutOfMemoryError
        return sample(engine, *args, **options)

    monkeypatch.setattr(runner, "run", in_little_memory)
    with one_thread():
        main([*search[:-1], "full"])
        main([*search[:-1], "full,rkv@24+4,rkv@auto+4"])  # continues; a budget that is also named has one row
    results = json.loads((tmp_path / "eval/results.json").read_text())["results"]
    assert [row["setting"] for row in results] == ["full", "rkv@24+4"]
    assert "No compared budget has at most 2.0% rejected" in capsys.readouterr().out


def test_eval_refuses_a_search_that_cannot_end(search, capsys):
    tries = "rkv@auto+4 tries budgets from 16 tokens on, and no sequence fills them at a compaction"
    for flags, sentence in {
        **{("--max-tokens", tokens): f"{tries}: raise --max-tokens to 22 or more" for tokens in ("12", "16", "18")},
        ("--max-tokens", "21"): "rkv@auto+4 never evicts: responses of 21 tokens are too short for an interval of 4. Add a "
        "smaller one, as in rkv@auto+1, or raise --max-tokens.",
        ("--compare", "rkv@auto+64"): "rkv@auto+64 never evicts: responses of 48 tokens are too short for an interval of 64.",
        ("--compare", "rkv@auto"): "rkv@auto needs the mismatch of each budget that it tries: add --mismatch",
    }.items():
        command = [each for each in search if "add --mismatch" not in sentence or each != "--mismatch"]
        with pytest.raises(SystemExit):
            main([*command, *flags, "--overwrite"])
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--alerts.xi-p05", "0.5"], "--alerts.xi-p05 needs --mismatch, whose figures it judges: add --mismatch."),
        (["--mismatch", "--correction.drop", "mean"], "correction.drop = mean has no bound: set correction.low or"),
    ],
)
def test_eval_refuses_criteria_that_judge_nothing(search, tmp_path, capsys, flags, sentence):
    command = [each for each in search if each != "--mismatch"]
    assert refused(capsys, *command[:-1], "rkv@16", *flags).startswith(sentence) and not (tmp_path / "eval").exists()


def test_long_tail_weighs_rows_and_ignores_short_ones():
    long, short = torch.tensor([0.0] * 10 + [-1.0] * 10), torch.full((4,), -9.0)
    assert long_tail([short, long, short, short]) == pytest.approx(math.exp(-1))
    assert long_tail([short, long, short, short], [1, 1, 1, 9]) == pytest.approx(math.exp(-9))
    assert math.isnan(long_tail([])) and long_tail([torch.tensor([math.nan])]) < 1e-8
