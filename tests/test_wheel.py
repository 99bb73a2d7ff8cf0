"""What is installed is whole: the quickstart runs from the built wheel in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT = [
    *("--steps", "1", "--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "2", "--rollout.max-tokens", "40"),
    *("--eval.problems", "4", "--kv.budget", "20", "--kv.interval", "5", "--model.device", "cpu"),
]


@pytest.mark.slow
def test_the_wheel_brings_recipes_and_the_embedded_model(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    run = [sys.executable, "-m", "sparse_rl", "train", "quickstart", *SHORT]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(run, cwd=empty, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout and "runs/quickstart/sparse_rl" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import sparse_rl; print(sparse_rl.__file__)"],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(tmp_path / "site"))
    report = (empty / "runs" / "quickstart" / "report.html").read_text()
    assert "uPlot" in report and "Mean reward over rollouts with a verdict" in report
    for method in ("dense", "sparse_rl"):
        assert (empty / "runs" / "quickstart" / method / "model" / "model.safetensors").is_file()
