"""What a run says at its start and its end is about what the user asked, in units that do not change within a table."""

import json
from pathlib import Path

from small_runs import arguments, refused
from sparse_rl.cli import main
from sparse_rl.config import Config, DataConfig, EvalConfig
from sparse_rl.evaluate.benchmark import Cost, EvalSample, score
from sparse_rl.evaluate.result import Result
from sparse_rl.evaluate.table import benchmark_tables, latex_rows, summary_table
from sparse_rl.report.held_out import scores
from sparse_rl.report.runs import Run
from sparse_rl.terminal import Terminal
from sparse_rl.train.summary import print_summary


def written(folder, method, scores, graded=False, peak=5e6, dense=4e6, kv=None):
    """A run whose evaluations had these scores: (mean, low, high)."""
    run = folder / method
    run.mkdir(parents=True)
    rows = []
    for step, (mean, low, high) in enumerate(scores):
        key = "eval/sums/pass@1"
        rows.append({"step": step, key: mean, f"{key}_low": low, f"{key}_high": high})
        rows[-1] |= {"eval/sums/graded": 1.0} if graded else {}
    rows[-1] |= {"reward/mean": 0.5, "kv/peak_bytes": peak, "kv/dense_bytes": dense, "kv/token_savings": 0.11}
    rows[-1] |= {"sparse/rejection_rate": 0.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(method=method, run_dir=str(run), data=DataConfig(train="a.jsonl", test="b.jsonl"), kv=kv or {})


def summary(capsys, *configs):
    print_summary(list(configs), Terminal(highlight=False, width=200))
    return capsys.readouterr().out


def test_one_negative_score_gives_the_whole_table_plain_numbers(tmp_path, capsys):
    dense = written(tmp_path, "dense", [(0.5, 0.4, 0.6), (0.7, 0.6, 0.8)])
    sparse = written(tmp_path, "sparse_rl", [(0.5, 0.4, 0.6), (-0.1, -0.2, 0.0)])
    assert "held-out pass@1 before and after" in summary(capsys, dense) and "%" in summary(capsys, dense)
    out = summary(capsys, dense, sparse)
    assert "held-out mean reward before and after" in out and "pass@1" not in out
    assert "0.5 [0.4, 0.6]" in out and "-0.1 [-0.2, 0]" in out and "50.0%" not in out


def test_a_graded_reward_is_not_called_pass_at_1(tmp_path, capsys):
    out = summary(capsys, written(tmp_path, "dense", [(0.5, 0.4, 0.6)] * 2, graded=True))
    assert "held-out mean reward before and after" in out and "pass@1" not in out and "0.5 [0.4, 0.6]" in out


def test_a_cache_larger_than_a_dense_one_is_said_to_save_no_memory(tmp_path, capsys):
    scored = [(0.5, 0.4, 0.6)] * 2
    out = summary(capsys, written(tmp_path / "a", "sparse_rl", scored))
    assert "tokens not held" in out and "saved " not in out.split("no memory was saved")[0]
    assert "sparse_rl: no memory was saved. Each slot has room for kv.budget + kv.interval = 640 tokens" in out
    assert "no memory was saved" not in summary(capsys, written(tmp_path / "b", "sparse_rl", scored, peak=3e6))
    assert "no memory was saved" not in summary(capsys, written(tmp_path / "c", "dense", scored))


def test_a_cache_that_keeps_all_keys_is_not_told_to_lower_its_budget(tmp_path, capsys):
    """It has none."""
    kv = {"policy": "full", "dtype": "4bit"}
    out = summary(capsys, written(tmp_path, "sparse_rl", [(0.5, 0.4, 0.6)] * 2, kv=kv))
    assert "sparse_rl: no memory was saved. kv.policy = full allocates 128 tokens for each slot" in out
    assert "kv.budget" not in out


def test_an_evaluation_that_was_turned_off_is_not_said_to_have_no_problems(tmp_path, capsys):
    config = written(tmp_path, "dense", [(0.5, 0.4, 0.6)])
    off = config.model_copy(update={"eval": EvalConfig(problems=0)})
    none = config.model_copy(update={"data": DataConfig(train="a.jsonl")})
    assert "not evaluated (eval.problems = 0);" in summary(capsys, off)
    assert "not evaluated: there are no held-out problems (data.test);" in summary(capsys, none)


def test_the_report_gives_all_scores_of_a_run_the_same_unit():
    key = "eval/a/pass@1"
    rows = [
        {"step": 0, key: 0.5, f"{key}_low": 0.4, f"{key}_high": 0.6},
        {"step": 1, key: 0.1, f"{key}_low": -0.2, f"{key}_high": 0.4},
    ]
    shown = [str(each) for each in scores(Run(Path("run"), "run", rows=rows))[key]]
    assert shown == ["0.5 [0.4, 0.6]", "0.1 [-0.2, 0.4]"]


def results(name, *rewards_of_settings):
    found = []
    for number, rewards in enumerate(rewards_of_settings):
        samples = [EvalSample(index, 0, reward, 3, "stop", False, 1, "") for index, reward in enumerate(rewards)]
        found.append(Result(name, f"cache {number}", score(samples, Cost(), 1, ks=(1,)), None, None, None))
    return found


def test_a_benchmark_is_shown_in_one_unit_whatever_the_cache(capsys):
    graded, plain = results("graded", [0.0, 1.0, 1.0, 0.0], [0.5, -0.5, 1.0, 0.0]), results("plain", [0.0, 1.0], [1.0, 1.0])
    console = Terminal(highlight=False, width=200)
    for table in benchmark_tables("graded", graded):
        console.print(table)
    out = capsys.readouterr().out
    assert "mean reward" in out and "Pass@1" not in out and "0.5 [" in out and "50.0% [" not in out
    console.print(summary_table([("graded", graded), ("plain", plain)]))
    out = capsys.readouterr().out
    assert "graded mean reward" in out and "plain Pass@1" in out and "50.0% [" in out
    assert [row.count("$") for row in latex_rows([("graded", graded), ("plain", plain)])] == [0, 6, 6]
    assert "& $0.5^" in latex_rows([("graded", graded)])[1] and "& $50.0^" in latex_rows([("plain", plain)])[1]


def test_a_data_file_that_is_missing_is_what_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags in (["--data.train", "nope.jsonl"], ["--data.test", "nope.jsonl"]):
        assert refused(capsys, "train", "--run-dir", "run", *flags).startswith("No task or file is named nope.jsonl: ")
    assert not list(tmp_path.iterdir())


def test_fewer_problems_than_a_step_takes_are_remarked_on(world, tmp_path, capsys):
    remark = "has 8 problems, fewer than rollout.prompts_per_step = 9: a step samples some problems more than once."
    flags = ["--method", "dense", "--rollout.max-tokens", "2", "--steps", "1", "--rollout.prompts-per-step"]
    for count, dry in (("9", ["--dry-run"]), ("8", ["--dry-run"]), ("9", [])):
        main(arguments(world, tmp_path / "run", *flags, count, *dry))
        assert (remark in " ".join(capsys.readouterr().out.split())) == (count == "9")
