"""The shoot-out: arms run by value, budgets follow from bytes, and the script runs through on the embedded model."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments/shootout"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_a_target_of_bytes_that_no_budget_reaches_is_refused(module):
    grid = module("grid")
    task = grid.read_plan()["tasks"]["gsm8k"]
    with pytest.raises(ValueError, match="saved = 0.99 is out of reach"):
        grid.Arm("rkv", {"policy": "rkv"}, saved=0.99).cache(task, lambda kv: kv.capacity, 500)


def test_arms_without_a_result_run_by_value_and_on_all_tasks(module, tmp_path):
    grid = module("grid")
    plan = {
        "tasks": {"a": {}, "b": {}},
        "arms": {"x": {"budgets": [0.2, 0.1]}, "y": {"budgets": {"a": [0.3]}}, "z": {"saved": 0.5}},
    }
    (tmp_path / "a").mkdir()
    grid.file_of(tmp_path, "a", "full").write_text('{"decode_s": 3}')
    named = [(task, arm.name) for task, arm in grid.missing(plan, ["a", "b"], tmp_path)]
    assert named == [
        ("b", "full"),
        ("a", "x 0.2"),
        ("b", "x 0.2"),
        ("a", "y 0.3"),
        ("a", "z"),
        ("b", "z"),
        ("a", "x 0.1"),
        ("b", "x 0.1"),
    ]
    assert [arm.name for _, arm in grid.missing(plan, ["a"], tmp_path, ["z"])] == ["z"]
    assert grid.usual_seconds(tmp_path, "a") == 3 and grid.usual_seconds(tmp_path, "b") is None


def test_the_script_runs_what_is_missing_and_then_nothing(module, tmp_path, capsys):
    run = module("run")
    command = ["arithmetic", "--model", "tiny", "--prompts", "1", "--dtype", "float32", "--out", str(tmp_path)]
    command += ["--arms", "triattention protected recent 0.3"]
    run.main([*command, "--missing"])
    assert "2 arms without a result" in capsys.readouterr().out
    run.main(command)
    made = json.loads((tmp_path / "arithmetic/triattention_protected_recent_0.3.json").read_text())
    assert made["kv"]["policy"] == "triattention" and 0 <= made["rejected"] <= 1 and made["seconds"] > 0
    capsys.readouterr()
    run.main(command)
    assert "0 arms without a result" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"has results with task"):
        run.main([*command, "--arms", "triattention protected recent 0.1", "--prompts", "2"])
