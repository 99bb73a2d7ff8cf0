"""The same run on a Ray cluster of two workers, one of which is lost, with its folder on shared storage."""

import os
import re
import signal
import time
from unittest import mock

import pytest
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from ranks import started
from small_runs import arguments, metrics, one_package_missing, train
from sparse_rl.cli import main
from sparse_rl.errors import UserError
from sparse_rl.integrations.ray import busy_notice, check_resources
from storage import s3_bucket

STEPS = ["--rollout.prompts-per-step", "4", "--checkpoint.every", "1", "--optimizer.lr", "3e-4", "--steps", "5"]


@pytest.fixture(scope="module")
def cluster():
    """(address of an empty bucket, its file system, address of a Ray cluster whose workers have access to it)."""
    settings = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    settings["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # a process per start, for clouds that announce the end of a machine
    with mock.patch.dict(os.environ, settings), s3_bucket() as (bucket, fs):
        head = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        yield bucket, fs, head.address
        head.shutdown()


def driver(output, command, **variables):
    """The command in a process that has this one's environment."""
    return started(output, dict(os.environ) | variables, main, [*command, "--ray.workers", "2"])


def test_ray_workers_learn_what_one_process_learns_and_survive_the_loss_of_one(world, cluster, tmp_path):
    one, run, output = tmp_path / "one", tmp_path / "run", tmp_path / "output.txt"
    train(world, one, *STEPS)
    bucket, fs, address = cluster
    process = driver(output, arguments(world, f"{bucket}/run", *STEPS), RAY_ADDRESS=address)
    try:
        ends = time.monotonic() + 300
        while not fs.exists("shared/run/checkpoints/step-2/state.json"):
            assert time.monotonic() < ends and process.is_alive(), output.read_text()
            time.sleep(0.2)  # each look is a request that this process answers
        log = fs.cat_file("shared/run/logs/rank-1.log").decode()
        os.kill(int(re.search(r"rank 1 of 2, process (\d+)", log)[1]), signal.SIGKILL)
        process.join(400)
        assert process.exitcode == 0, output.read_text()
    finally:
        process.kill()
    fs.get("shared/run", str(run), recursive=True)
    assert (run / "logs/rank-1.log").read_text().count("rank 1 of 2") == 2
    assert "Continuing after step" in output.read_text()
    assert [row["step"] for row in metrics(run)] == list(range(6))
    mine, theirs = load_file(one / "model/model.safetensors"), load_file(run / "model/model.safetensors")
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-5
    assert any(not torch.equal(load_file(world / "model/model.safetensors")[name], theirs[name]) for name in theirs)


def test_what_one_worker_is_refused_with_ends_all_of_them_and_keeps_the_run_that_was_to_be_replaced(world, cluster, tmp_path):
    run, output = tmp_path / "run", tmp_path / "output.txt"
    train(world, run, "--steps", "1")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    command = arguments(one_package_missing(world, tmp_path), run, *STEPS, "--overwrite")
    process = driver(output, [*command, "--ray.address", cluster[2]])
    process.join(400)
    process.kill()
    said = output.read_text()
    assert process.exitcode == 2, said
    assert said.count("Started training worker group") == 1, "started again"
    assert said.splitlines()[-1].startswith("sparse-rl, rank 1: ")
    assert "there_is_no_such_package" in said.splitlines()[-1]
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_cluster_that_lacks_something_says_what():
    nodes = [{"CPU": 64, "GPU": 2}, {"CPU": 4}]
    sentence = r"8 is too many: a worker needs 1 CPU and 1 GPU, and the nodes of the Ray cluster \(64 CPU and 2 GPU; 4 CPU and 0 GPU\) have room for 2"
    with pytest.raises(UserError, match=sentence):
        check_resources(nodes, 8, {"CPU": 1, "GPU": 1})
    with pytest.raises(UserError, match="have room for 1: add nodes"):
        check_resources([{"CPU": 4}, {"CPU": 8}], 2, {"CPU": 8, "GPU": 0})  # enough in all, but not in one place
    check_resources([{"CPU": 2}], 2, {"CPU": 1, "GPU": 0})


def test_a_busy_cluster_is_named():
    needs = {"CPU": 8, "GPU": 1}
    assert busy_notice({"CPU": 16, "GPU": 1}, 2, needs) == (
        "The Ray cluster is busy (free: 1 of 2 GPU): the run starts when all of them are free."
    )
    assert busy_notice({"CPU": 16, "GPU": 2}, 2, needs) is None
    assert "(free: 0 of 2 CPU)" in (busy_notice({}, 2, {"CPU": 1, "GPU": 0}) or "")


def test_a_comparison_is_not_for_ray(world, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([*arguments(world, tmp_path / "run", *STEPS), "--ray.workers", "2", "--compare", '["dense", "naive"]'])
    assert "pass one --method with --ray.workers" in capsys.readouterr().err
