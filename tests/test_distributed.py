"""Many ranks are one run: the same weights, the same metrics, checkpoints that either reads, and the loss of a rank survived."""

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ranks
from ranks import run_ranks
from small_runs import arguments, make_world, metrics, one_package_missing, train, without_clock
from sparse_rl.cli import main
from sparse_rl.errors import UserError
from sparse_rl.train.distributed import gpu_of
from sparse_rl.world import World, balanced_passes

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none

STEPS = ["--steps", "5", "--rollout.prompts-per-step", "4", "--rollout.max-tokens", "24", "--checkpoint.every", "1"]
STEPS += ["--optimizer.lr", "3e-4"]  # AdamW makes a step of this size also of a gradient that is zero but for rounding
SIX_STEPS = [*STEPS, "--steps", "6"]
# Last of the runs of a process: where the CPU has no bfloat16, torch multiplies with another library from then on.
HALF = [*STEPS, "--steps", "2", "--model.dtype", "bfloat16", "--loss.kl-coef", "0.01", "--optimizer.clip-norm", "0.1"]
TESTED = ["--data.test", "{problems},arithmetic", "--eval.problems", "3"]
KINDS = {
    "sparse_rl": ["--loss.kl-coef", "0.01", *TESTED],
    "two updates": ["--optimizer.updates-per-step", "2", "--optimizer.tokens-per-microbatch", "64"],
    "smd, little memory": ["--method", "smd", "--optimizer.tokens-per-microbatch", "64", "--ranks.hold-gradients", "false"],
    "on_policy_sparse, statistics": [
        *("--method", "on_policy_sparse", "--optimizer.gradient-checkpointing"),
        *("--kv.policy", "expected", "--kv.dtype", "8bit"),
    ],
    "lora": ["--model.lora.rank", "2", "--loss.entropy-coef", "0.01", *TESTED],
    "refill rejected": ["--rollout.refill-rejected", "true", "--correction.veto", "0.6", "--rollout.slots", "3"],
    "auto": [
        *("--kv.budget", "auto", "--kv.target-rejected", "0.3", "--correction.veto", "0.4"),
        *("--rollout.samples-per-prompt", "16"),  # so many slots that the 128 rollouts of a probe take few steps
    ],
    "few slots": ["--rollout.slots", "3", "--method", "dense", "--loss.name", "dapo", "--eval.slots", "1", *TESTED],
}
OF_ONE_RANK = {"kv/dense_bytes", "kv/peak_bytes", "kv/pool_used", "kv/straggler_pages"}


def together(folder: Path, *each: list[str]) -> None:
    """The commands one after the other, on two ranks."""
    for code, output in run_ranks(folder, ranks.commands, *each):
        assert code == 0, output


def refused(folder: Path, work: Callable, *given) -> str:
    """What all of two ranks that fail print."""
    ended = run_ranks(folder, work, *given)
    assert all(code for code, _ in ended), ended
    return "".join(output for _, output in ended)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


def assert_same_weights(left: Path, right: Path, most: float = 1e-5) -> None:
    mine, theirs = weights(left), weights(right)
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) <= most


def lengths(run: Path) -> dict[str, float]:
    """Response lengths by which groups are assigned to ranks, after the last of six steps."""
    return json.loads((run / "checkpoints/step-6/state.json").read_text())["mean_tokens"]


# Two ranks are one


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """The folder of all runs on two ranks, `two-KIND`, and of those on one rank, `one-KIND`. One start of the ranks serves all."""
    folder = tmp_path_factory.mktemp("runs")
    problems = world / "problems.jsonl"
    flags = {kind: [*STEPS, "--steps", "2", *options] for kind, options in KINDS.items()} | {"half": HALF}
    flags = {kind: [option.format(problems=problems) for option in options] for kind, options in flags.items()}
    train(world, folder / "grows", *STEPS, "--steps", "2")
    for kind, options in flags.items():
        train(world, folder / f"one-{kind}", *options)
    together(
        folder,
        arguments(world, folder / "undisturbed", *SIX_STEPS),
        arguments(world, folder / "grows", *STEPS, "--resume"),
        arguments(world, folder / "shrinks", *STEPS, "--steps", "2"),
        *(arguments(world, folder / f"two-{kind}", *options) for kind, options in flags.items()),
    )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_learns(world, runs, kind):
    one, two = runs / f"one-{kind}", runs / f"two-{kind}"
    assert_same_weights(one, two)
    if kind != "lora":
        before = load_file(world / "model/model.safetensors")
        assert any(not torch.equal(before[name], tensor) for name, tensor in weights(two).items())
    for left, right in zip(without_clock(metrics(one)), without_clock(metrics(two)), strict=True):
        assert left.keys() == right.keys()
        for key in left.keys() - OF_ONE_RANK:
            assert left[key] == pytest.approx(right[key], rel=1e-3, abs=1e-5), key
    if kind == "refill rejected":
        assert all(row["sparse/replaced"] > 0 for row in metrics(two)[1:])
    assert "step 2/2" in (two / "logs/rank-1.log").read_text()
    assert all(0 <= row["perf/rank_wait"] < 1 for row in metrics(two)[1:])


def test_a_run_goes_on_with_more_ranks_and_with_fewer(world, runs, tmp_path):
    whole, shrinks = tmp_path / "whole", shutil.copytree(runs / "shrinks", tmp_path / "shrinks")
    train(world, whole, *STEPS)
    train(world, shrinks, *STEPS, "--resume")
    for each in (runs / "grows", shrinks):
        assert_same_weights(whole, each)
        assert [row["step"] for row in metrics(each)] == [0, 1, 2, 3, 4, 5]


def test_a_rank_that_is_killed_costs_no_more_than_the_steps_since_the_last_checkpoint(world, runs, tmp_path):
    """Two launchers that meet, as on two machines: each counts its own restarts."""
    whole, run = runs / "undisturbed", tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    nodes += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "two"]
    command, outputs = arguments(world, run, *SIX_STEPS), [tmp_path / f"node-{number}.txt" for number in range(2)]
    launchers = [ranks.started(output, {}, ranks.torchrun, nodes, command) for output in outputs]
    try:
        ends = time.monotonic() + 300
        while not (run / "checkpoints/step-3/state.json").exists():
            assert time.monotonic() < ends, [output.read_text()[-3000:] for output in outputs]
            time.sleep(0.05)
        log = (run / "logs/rank-1.log").read_text()
        os.kill(int(re.search(r"rank 1 of 2, process (\d+)", log)[1]), signal.SIGKILL)
        for launcher in launchers:
            launcher.join(400)
        assert [launcher.exitcode for launcher in launchers] == [0, 0], [output.read_text()[-3000:] for output in outputs]
    finally:
        for launcher in launchers:
            launcher.terminate()  # and with it its ranks
    output = "".join(output.read_text() for output in outputs)
    assert " did not respond (" in output or "Another rank was lost during a step (" in output
    assert "Continuing after step" in output
    assert [row["step"] for row in metrics(run)] == list(range(7))
    assert lengths(whole) == lengths(run) and len(lengths(whole)) == 8
    assert_same_weights(whole, run, most=0.0)


def test_a_folder_that_is_taken_is_not_continued_because_the_launcher_tries_again(world, tmp_path):
    """The second start has the id of the first, as after a restart by torchrun."""
    run = tmp_path / "run"
    train(world, run, *STEPS, "--steps", "1")
    for _ in range(2):
        sentence = refused(tmp_path, ranks.launched, "one launch", arguments(world, run, *STEPS))
        assert " already contains a run: use --resume, --overwrite or another --run-dir." in sentence
    assert len(metrics(run)) == 2


def test_half_precision_on_two_ranks_begins_as_on_one(runs):
    """Up to rounding: some CPUs round a product of bfloat16 by the number of its rows. From the second step on the runs part, as
    their gradients are rounded in another order."""
    first, same = (without_clock(metrics(runs / name))[1] for name in ("one-half", "two-half"))
    for key in first.keys() - OF_ONE_RANK:
        assert first[key] == pytest.approx(same[key], rel=5e-2, abs=1e-5), key
    assert all(
        row["sparse/engine_noise"] < 0.1 and row["policy/skipped_updates"] == 0 for row in metrics(runs / "two-half")[1:]
    )


# What does not go together


def test_prompts_that_do_not_divide_are_refused_with_a_number_that_does(world, tmp_path):
    sentence = refused(tmp_path, main, arguments(world, tmp_path / "run", "--rollout.prompts-per-step", "3"))
    assert "3 is not divisible by 2 ranks: try --rollout.prompts-per-step 4." in sentence
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_gpus_are_refused():
    assert gpu_of(3, 4) == 3
    with pytest.raises(
        UserError, match=r"has 4 GPUs but at least 5 ranks: start at most one rank per GPU, with --nproc-per-node 4\."
    ):
        gpu_of(4, 4)


def test_ranks_of_different_recipes_are_refused(world, tmp_path):
    sentence = refused(tmp_path, ranks.with_own_rates, arguments(world, tmp_path / "run", *STEPS), "0.5", "0.25")
    assert (
        "optimizer.lr is 0.25 on rank 1 and 0.5 on rank 0: start all ranks with the same installation, recipe and flags."
        in sentence
    )


def test_a_checkpoint_of_another_model_is_refused(world, tmp_path, capsys):
    run, other = tmp_path / "run", make_world(tmp_path / "other", hidden_size=16)
    train(world, run, *STEPS, "--steps", "1")
    config = (run / "config.toml").read_text()
    for file in ("model", "rewards.py", "problems.jsonl"):
        config = config.replace(str(world / file), str(other / file))
    (run / "config.toml").write_text(config)
    with pytest.raises(SystemExit):
        train(other, run, *STEPS, "--resume")
    assert (
        " does not match the model of this run: resume with the model that the checkpoint was trained from."
        in capsys.readouterr().err
    )


# Who does what


def test_rows_are_dealt_evenly_and_within_the_limit():
    lengths = [100, 90, 80, 30, 30, 30, 20, 10, 5, 5]
    assigned = balanced_passes(lengths, 2, 120)
    assert sorted(row for rank in assigned for rows in rank for row in rows) == list(range(10))
    assert len({len(rank) for rank in assigned}) == 1
    assert all(sum(lengths[row] for row in rows) <= 120 for rank in assigned for rows in rank)
    loads = [sum(lengths[row] for rows in rank for row in rows) for rank in assigned]
    assert max(loads) - min(loads) <= 30
    assert balanced_passes([500], 2, 120) == [[[0]], [[]]]  # longer than a pass, and nothing for the other rank


def test_one_rank_takes_everything():
    take = World().work_queue([1.0, 3.0, 2.0], at_once=5)
    assert [take() for _ in range(4)] == [1, 2, 0, None]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    assert re.search(r"RankLost: Rank 1 did not respond \(ranks.timeout_s = 2\)", refused(tmp_path, ranks.late))


# One rank refuses


def test_a_refusal_ends_ranks_that_wait_and_ranks_that_are_stuck(tmp_path):
    ended = run_ranks(tmp_path, ranks.one_refuses, count=3, seconds=60)
    assert [code for code, _ in ended] == [2, 2, 2], ended
    assert all("sparse-rl, rank 1: There is no room.\n" in told for _, told in ended[:2]), (
        ended
    )  # the last one says it once a machine


def test_a_run_that_one_rank_refuses_ends_with_its_sentence_and_leaves_nothing(world, tmp_path):
    """Also where the launcher was asked to start lost ranks again."""
    run, file = tmp_path / "run", tmp_path / "output.txt"
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = arguments(one_package_missing(world, tmp_path), run, *STEPS)
    launcher = ranks.started(file, {}, ranks.torchrun, options, command)
    launcher.join(400)
    launcher.terminate()  # and with it its ranks
    output = file.read_text()
    assert launcher.exitcode == 1, output
    lines = [line for line in output.splitlines() if line.startswith("sparse-rl")]
    assert lines and {line.split(": ")[0] for line in lines} == {"sparse-rl, rank 1"}, output
    assert all("there_is_no_such_package" in line for line in lines), output
    assert (
        "exitcode  : 2" in output
        and "Stopping after this step. Press Ctrl-C again to stop now and discard the step." not in output
    )
    assert not run.exists()
