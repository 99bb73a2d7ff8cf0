"""`sparse-rl eval --mismatch` as the probe of kv.budget = auto: the same figures, targets and search."""

import json
import math

import numpy as np
import pytest
import torch

from small_runs import one_thread
from sparse_rl.cli import main
from sparse_rl.evaluate import runner
from sparse_rl.learner.correction import long_tail
from sparse_rl.monitor.budget import ladder


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
    for flags, sentence in {
        ("--max-tokens", "12"): "rkv@auto+4 tries budgets from 16 tokens on, and no sequence fills them: raise --max-tokens",
        ("--compare", "rkv@auto"): "rkv@auto needs the mismatch of each budget that it tries: add --mismatch",
    }.items():
        command = [each for each in search if sentence.startswith("rkv@auto+4") or each != "--mismatch"]
        with pytest.raises(SystemExit):
            main([*command, *flags])
        assert sentence in capsys.readouterr().err


def test_long_tail_weighs_rows_and_ignores_short_ones():
    long, short = torch.tensor([0.0] * 10 + [-1.0] * 10), torch.full((4,), -9.0)
    assert long_tail([short, long, short, short]) == pytest.approx(math.exp(-1))
    assert long_tail([short, long, short, short], [1, 1, 1, 9]) == pytest.approx(math.exp(-9))
    assert math.isnan(long_tail([])) and long_tail([torch.tensor([math.nan])]) < 1e-8
