"""A run that ends early, in whatever way, goes on where it was and ends in the same weights to the bit."""

import json
import random
import shutil
import signal

import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from small_runs import Command, arguments, metrics, one_thread, refused, train, without_clock
from sparse_rl.cli import main

EVERY_STEP = ["--checkpoint.every", "1", "--rollout.max-tokens", "16"]
DENSE = ["--method", "dense", "--rollout.max-tokens", "8"]
SCORED = ["--eval.problems", "2", "--eval.every", "1"]
KINDS = {
    "full": ["--loss.kl-coef", "0.01", *SCORED],
    "lora": ["--loss.kl-coef", "0.01", *SCORED, "--model.lora.rank", "2"],
    "bfloat16": ["--method", "dense", "--optimizer.state", "offload", "--model.dtype", "bfloat16"],
    "8bit": ["--method", "dense", "--optimizer.state", "8bit"],
}


def state_of(run, step):
    """Everything a checkpoint holds, as a tree."""
    folder, one_file = run / f"checkpoints/step-{step}", run / f"step-{step}.pt"
    dcp_to_torch_save(folder, one_file)
    return [torch.load(one_file, weights_only=False), json.loads((folder / "state.json").read_text())]


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(*(each.dequantize() if hasattr(each, "codes") else each for each in (left, right)))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return left == right


def assert_same_run(left, right, steps):
    assert same(state_of(left, steps), state_of(right, steps))
    assert without_clock(metrics(left)) == without_clock(metrics(right))
    assert (left / "xi.jsonl").read_bytes() == (right / "xi.jsonl").read_bytes()
    for step in range(1, steps + 1):
        name = f"rollouts/step-{step}.parquet"
        assert pq.read_table(left / name).equals(pq.read_table(right / name))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_to_the_bit(world, tmp_path, kind):
    """Weights, moments, metrics and rollouts of 3 steps are those of 1 step and 2 more."""
    flags = [*EVERY_STEP, *KINDS[kind], "--data.test", str(world / "problems.jsonl")]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with torch.compiler.set_stance("force_eager"):  # torchao compiles, which takes longer than all the rest
        train(world, whole, *flags, "--steps", "3")
        train(world, parts, *flags, "--steps", "1")
        train(world, parts, *flags, "--steps", "3", "--resume")
    assert_same_run(whole, parts, 3)
    assert not same(state_of(whole, 2)[0], state_of(whole, 3)[0])


def test_a_killed_run_resumes_to_the_same_weights(world, tmp_path):
    """Killed once right after a step was logged, while its checkpoint is written, and once in the middle of grading."""
    killed = tmp_path / "killed"
    first = Command(arguments(world, killed, *EVERY_STEP, "--steps", "500"))
    first.read_to(f"step {random.Random(0).choice([1, 2, 3])}/500")
    first.signal(signal.SIGKILL)
    assert first.end()[0] == -signal.SIGKILL
    second = Command(arguments(world, killed, *EVERY_STEP, "--steps", "500", "--resume", reward="kills_the_trainer"))
    assert second.end()[0] == -signal.SIGKILL
    steps = int(metrics(killed)[-1]["step"]) + 2
    train(world, killed, *EVERY_STEP, "--steps", str(steps), "--resume")
    train(world, tmp_path / "whole", *EVERY_STEP, "--steps", str(steps))
    assert_same_run(tmp_path / "whole", killed, steps)


def test_what_a_crash_left_does_no_harm(world, tmp_path):
    """Torn lines, rollouts after the checkpoint, half a checkpoint."""
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    train(world, whole, *DENSE)
    train(world, crashed, *DENSE, "--steps", "1")
    with (crashed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 3.5}\n{"step": 3, "rew')
    with (crashed / "xi.jsonl").open("a") as file:
        file.write('{"step": 2, "counts": [3, 5]}\n{"step": 3, "cou')
    (crashed / "rollouts/step-2.parquet").write_bytes(b"PAR1")
    (crashed / "checkpoints/step-7").mkdir()
    (crashed / "checkpoints/step-7/__0_0.distcp").write_bytes(b"PK")
    train(world, crashed, *DENSE, "--resume")
    assert_same_run(whole, crashed, 2)
    assert {path.name for path in (crashed / "checkpoints").iterdir()} == {"step-1", "step-2"}


def test_a_run_without_a_checkpoint_yet_starts_over(world, tmp_path):
    train(world, tmp_path / "whole", *DENSE)
    train(world, tmp_path / "early", *DENSE)
    for step in (tmp_path / "early/checkpoints").iterdir():
        (step / "state.json").unlink()
    train(world, tmp_path / "early", *DENSE, "--resume")
    assert_same_run(tmp_path / "whole", tmp_path / "early", 2)


def test_a_run_knows_how_it_was_told_to_run(world, tmp_path):
    """Its folder is all that --resume needs, wherever that was moved to."""
    train(world, tmp_path / "before", *DENSE, "--steps", "1")
    (tmp_path / "before").rename(tmp_path / "after")
    with one_thread():
        main(["train", "--resume", "--run-dir", str(tmp_path / "after"), "--steps", "2"])
    train(world, tmp_path / "whole", *DENSE)
    assert_same_run(tmp_path / "whole", tmp_path / "after", 2)
    assert not (tmp_path / "before").exists()


def test_a_comparison_goes_on_with_what_is_missing(world, tmp_path, capsys):
    flags = [*DENSE, "--steps", "1", "--compare", '["dense", "naive"]']
    train(world, tmp_path / "both", *flags)
    before = metrics(tmp_path / "both/dense")
    shutil.rmtree(tmp_path / "both/naive")
    train(world, tmp_path / "both", *flags, "--resume")
    assert metrics(tmp_path / "both/dense") == before and len(metrics(tmp_path / "both/naive")) == 2


def test_the_last_checkpoints_and_the_best_are_kept(world, tmp_path):
    run = tmp_path / "run"
    flags = [*DENSE, "--checkpoint.every", "1", "--checkpoint.keep", "2"]
    train(world, run, *flags, "--steps", "3")
    train(world, run, *flags, "--steps", "6", "--resume")
    rewards = {row["step"]: row["reward/mean"] for row in metrics(run)[1:]}
    best = max(rewards, key=rewards.__getitem__)
    assert best < 5, "choose a seed whose best step is not among the last"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{best}", "step-5", "step-6"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_asked_to_stop_finishes_its_step_and_says_how_to_go_on(world, tmp_path, number):
    run = tmp_path / "a run"
    command = Command(arguments(world, run, "--steps", "500", "--rollout.max-tokens", "16"))
    command.read_to("step 1/500")
    command.signal(number)
    code, rest = command.end()
    assert code == 130
    done = int(metrics(run)[-1]["step"])
    assert 1 <= done < 500
    assert f"Stopped at step {done}; continue with sparse-rl train --resume --run-dir '{run}'." in rest
    assert "Stopping after this step" in rest and "Traceback" not in rest
    assert json.loads((run / f"checkpoints/step-{done}/state.json").read_text())["step"] == done
    assert not (run / "model").exists()
    train(world, run, "--steps", str(done + 1), "--rollout.max-tokens", "16", "--resume")
    assert [row["step"] for row in metrics(run)] == [*range(done + 2)]


def test_a_run_past_its_last_step_is_not_continued(world, tmp_path, capsys):
    train(world, tmp_path / "run", "--steps", "2", "--checkpoint.every", "1")
    assert "past steps = 1" in refused(capsys, *arguments(world, tmp_path / "run", "--resume", "--steps", "1"))
    train(world, tmp_path / "run", "--resume", "--steps", "3", "--checkpoint.every", "1")
    assert "Continuing after step 2." in capsys.readouterr().out
