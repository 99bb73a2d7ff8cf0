"""The shoot-out: results are of the grid, budgets follow from bytes, and the script runs through on the embedded model."""

import importlib
import json
from pathlib import Path

import pytest

from sparse_rl import KV
from sparse_rl.kv.policies import POLICIES
from sparse_rl.plan.dimensions import from_config, read_config

FOLDER = Path(__file__).parents[1] / "experiments/shootout"
TASKS = ("long", "math", "gsm8k")


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def bytes_of(grid, task, rows):
    """Return the function that gives the bytes of a sequence in a cache, for the model and the prompts of these results."""
    longest = max(answer["prompt_tokens"] for row in rows.values() for answer in row["raw"])
    shape = from_config(read_config("1.5B"), "1.5B")
    return lambda kv: grid.cache_bytes(kv, shape, 2, task["prompts"], longest, task["slots"], task["samples"])


@pytest.mark.parametrize("name", TASKS)
def test_every_result_is_of_an_arm_of_the_grid_and_takes_the_bytes_that_budgets_are_solved_for(module, name):
    grid, rows = module("grid"), module("page").results()[name]
    plan = grid.read_plan()
    task, arms = plan["tasks"][name], {arm.name: arm for arm in grid.arms_of(plan, name)}
    assert json.loads((FOLDER / "results" / name / "task.json").read_text())["task"] == task
    sizes = ("policy", "budget", "interval", "recent", "sinks", "protect_prompt", "dtype", "options")
    take, dense = bytes_of(grid, task, rows), rows[grid.DENSE]["live_bytes_16bit"]
    assert len(rows) == len(list((FOLDER / "results" / name).glob("*.gz"))), "a result is of no arm"
    for arm, row in rows.items():
        kv, made = KV(**row["kv"]), arms[arm].cache(task, take, dense)
        assert made.policy == "full" or [getattr(kv, key) == getattr(made, key) for key in sizes] == [True] * len(sizes), arm
        assert kv.policy == "full" or take(kv) == pytest.approx(row["bytes_per_sequence"], abs=8), arm


@pytest.mark.parametrize("name", TASKS)
def test_arms_of_equal_bytes_save_what_the_default_saves(module, name):
    grid, rows = module("grid"), module("page").results()[name]
    plan = grid.read_plan()
    task, arms = plan["tasks"][name], {arm.name: arm for arm in grid.arms_of(plan, name)}
    take, dense = bytes_of(grid, task, rows), rows[grid.DENSE]["live_bytes_16bit"]
    default = rows["triattention protected recent 0.2"]
    for policy in ("rkv", "snapkv", "tova"):
        kv = arms[f"{policy} protected equal bytes"].cache(task, take, dense)
        assert take(kv) == pytest.approx(default["bytes_per_sequence"], abs=0.6 * 28_896)  # half of a token's bytes
        assert kv.budget < default["kv"]["budget"] and kv.interval == default["kv"]["interval"]


def test_the_speed_of_every_policy_is_a_column_once_it_is_measured(module, tmp_path, monkeypatch):
    page = module("page")
    policies = [policy for policy in POLICIES if policy != "tova"]
    measured = {"arms": [{"policy": policy, "decode_tokens_per_s": 70_000.0} for policy in policies]}
    monkeypatch.setattr(page, "SPEED", tmp_path / "speed.json")
    assert "tokens/s" not in page.arms()
    page.SPEED.write_text(json.dumps(measured))
    assert page.arms().count("| 70,000 |") == len(policies)


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
