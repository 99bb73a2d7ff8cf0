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
    "triattention": ["--kv.policy", "triattention", "--kv.window", "auto", "--eval.cache", "sparse", *SCORED],
    "quantised": ["--kv.dtype", "8bit", "--eval.cache", "sparse", *SCORED],
    "quantised, full": ["--method", "on_policy_sparse", "--kv.policy", "full", "--kv.dtype", "4bit"],
}


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Two dense steps that nothing interrupts, to be looked at and copied."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(world, run, *DENSE)
    return run


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
    mine, theirs = state_of(left, steps), state_of(right, steps)
    for ours, others in zip(mine, theirs, strict=True):
        assert ours.keys() == others.keys()
        assert [key for key in ours if not same(ours[key], others[key])] == []
    assert without_clock(metrics(left)) == without_clock(metrics(right))
    assert (left / "xi.jsonl").read_bytes() == (right / "xi.jsonl").read_bytes()
    for step in range(1, steps + 1):
        name = f"rollouts/step-{step}.parquet"
        assert pq.read_table(left / name).equals(pq.read_table(right / name))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_to_the_bit(world, tmp_path, kind):
    """Weights, moments, metrics and rollouts of 2 steps are those of 1 step and another one."""
    flags = [*EVERY_STEP, *KINDS[kind], "--data.test", str(world / "problems.jsonl")]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with torch.compiler.set_stance("force_eager"):  # torchao compiles, which takes longer than all the rest
        train(world, whole, *flags, "--steps", "2")
        train(world, parts, *flags, "--steps", "1")
        train(world, parts, *flags, "--steps", "2", "--resume")
    assert_same_run(whole, parts, 2)
    assert not same(state_of(whole, 1)[0], state_of(whole, 2)[0])


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


def test_what_a_crash_left_does_no_harm(world, whole, tmp_path):
    """Torn lines, rollouts after the checkpoint, half a checkpoint."""
    crashed = tmp_path / "crashed"
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


def test_a_run_without_a_checkpoint_yet_starts_over(world, whole, tmp_path):
    early = shutil.copytree(whole, tmp_path / "early")
    for name in ("checkpoints", "model"):  # as if it had been killed before its first checkpoint
        shutil.rmtree(early / name)
    train(world, early, *DENSE, "--resume")
    assert_same_run(whole, early, 2)


def test_a_run_knows_how_it_was_told_to_run(world, whole, tmp_path):
    """Its folder is all that --resume needs, wherever that was moved to."""
    train(world, tmp_path / "before", *DENSE, "--steps", "1")
    (tmp_path / "before").rename(tmp_path / "after")
    with one_thread():
        main(["train", "--resume", "--run-dir", str(tmp_path / "after"), "--steps", "2"])
    assert_same_run(whole, tmp_path / "after", 2)
    assert not (tmp_path / "before").exists()


def test_a_comparison_goes_on_with_what_is_missing(world, tmp_path, capsys):
    flags = [*DENSE, "--steps", "1", "--compare", '["dense", "naive"]']
    train(world, tmp_path / "both", *flags)
    before = metrics(tmp_path / "both/dense")
    shutil.rmtree(tmp_path / "both/naive")
    train(world, tmp_path / "both", *flags, "--resume")
    assert metrics(tmp_path / "both/dense") == before and len(metrics(tmp_path / "both/naive")) == 2


def test_the_last_checkpoints_and_the_best_are_kept(world, tmp_path):
    """A checkpoint has earned what the rollouts of the next step got: they come from its weights."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    flags = [*DENSE, "--checkpoint.every", "1", "--checkpoint.keep", "2"]
    train(world, run, *flags, "--steps", "3")
    train(world, run, *flags, "--steps", "6", "--resume")
    train(world, whole, *flags, "--steps", "6")
    earned = {row["step"] - 1: row["reward/mean"] for row in metrics(run)[2:]}
    best = max(earned, key=earned.__getitem__)
    assert best < 5, "choose a seed whose best step is not among the last"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{best}", "step-5", "step-6"}
    for each in (run, whole):
        state = state_of(each, 6)[1]
        assert (state["best_step"], state["best_value"]) == (best, earned[best])


def test_the_best_checkpoint_is_not_one_that_an_update_has_destroyed(world, tmp_path, capsys):
    """The second update is far too large: its rollouts were the best, and its weights are the worst."""
    run, flags = tmp_path / "run", [*DENSE, "--checkpoint.every", "1", "--checkpoint.keep", "1", "--seed", "5"]
    train(world, run, *flags, "--steps", "1", "--optimizer.lr", "1e-5", reward="distinct")
    train(world, run, *flags, "--steps", "4", "--optimizer.lr", "100", "--resume", reward="distinct")
    rewards = [row["reward/mean"] for row in metrics(run)[1:]]
    assert rewards[1] == max(rewards) > rewards[0] > 2 * max(rewards[2:]), "choose a seed whose second step is the best"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-1", "step-4"}
    told = f"The best checkpoint by reward/mean is step 1 ({rewards[1]:.3g}). The last checkpoint, step 4, has no score"
    assert told in capsys.readouterr().out
    main(["export", str(run), str(tmp_path / "best"), "--step", "best"])
    assert "Exported step 1 of" in capsys.readouterr().out


def test_a_held_out_score_belongs_to_the_weights_it_was_measured_with(world, tmp_path):
    run, metric = tmp_path / "run", "eval/problems/pass@1"
    flags = [*DENSE, "--checkpoint.every", "1", "--checkpoint.keep", "1", "--checkpoint.best", metric]
    train(world, run, *flags, "--steps", "4", "--data.test", str(world / "problems.jsonl"), *SCORED)
    earned = {row["step"]: row[metric] for row in metrics(run)[1:]}
    best = max(earned, key=earned.__getitem__)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{best}", "step-4"}


# What may change


def test_the_learning_rate_may_change_and_that_is_written_down(world, tmp_path, capsys):
    run, flags = tmp_path / "run", [*DENSE, "--checkpoint.every", "1"]
    train(world, run, *flags, "--steps", "1")
    train(world, run, *flags, "--steps", "2", "--resume", "--optimizer.lr", "0.001", "--rollout.slots", "2")
    out = capsys.readouterr().out
    assert "warning: optimizer.lr is 0.001 from step 2 on, and was 0.01." in out
    assert "warning: rollout.slots is 2 from step 2 on, and was auto." in out
    assert [row["policy/lr"] for row in metrics(run)[1:]] == [0.01, 0.001]
    train(world, run, *flags, "--steps", "3", "--resume", "--optimizer.lr", "0.001", "--rollout.slots", "2")
    assert "optimizer.lr is" not in capsys.readouterr().out
    stored = (run / "config.toml").read_text()
    assert "lr = 0.001\n" in stored and "# until step 1: optimizer.lr = 0.01\n" in stored
    (run / "config.toml").write_text(stored.replace("weight_decay = 0.1", "weight_decay = 0.5"))
    sentence = refused(capsys, "train", "--resume", "--run-dir", str(run), "--steps", "4")
    assert "weight_decay is 0.5 now but was 0.1 in the checkpoint of step 3" in sentence
    two = ["--seed", "7", "--optimizer.weight-decay", "0.2"]
    sentence = refused(capsys, "train", "--resume", "--run-dir", str(run), *two)
    assert (
        f"optimizer.weight_decay is 0.2 now but was 0.5, seed is 7 now but was 0 in {run}: resume with the same values"
        in sentence
    )


def test_a_schedule_that_is_stretched_is_told(world, tmp_path, capsys):
    run = tmp_path / "run"
    train(world, run, *DENSE, "--steps", "2", "--optimizer.schedule", "cosine")
    train(world, run, *DENSE, "--steps", "4", "--optimizer.schedule", "cosine", "--resume")
    sentence = "steps is 4 now but was 2: the cosine schedule is stretched. Step 3 has the learning rate 0.005"
    assert sentence in capsys.readouterr().out
    assert metrics(run)[3]["policy/lr"] == pytest.approx(0.005)


def test_other_problems_are_refused_and_other_rewards_are_told(world, tmp_path, capsys):
    run, data = tmp_path / "run", tmp_path / "problems.jsonl"
    rows = (world / "problems.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(rows))
    flags = [*DENSE, "--checkpoint.every", "1", "--data.train", str(data)]
    train(world, run, *flags, "--steps", "2")
    best = state_of(run, 2)[1]["best_step"]
    again = arguments(world, run, *flags, "--steps", "3", "--resume")
    data.write_text("".join(rows[:5]))
    assert f"{data} has 5 problems now but had 8 at step 2" in refused(capsys, *again)
    data.write_text("".join(reversed(rows)))
    assert f"The prompts of {data} differ from those of step 2" in refused(capsys, *again)
    data.write_text("".join(rows))
    capsys.readouterr()
    train(world, run, *flags, "--steps", "3", "--resume", reward="distinct")
    out = capsys.readouterr().out
    assert (
        f"rewards.py:distinct now but was {world / 'rewards.py'}:sums: scores before and after step 2 cannot be compared"
        in out
    )
    state = state_of(run, 3)[1]
    assert best == 1 and (state["best_step"], state["best_value"]) == (2, metrics(run)[3]["reward/mean"])
    data.write_text("".join(rows).replace('"1"}', '"2"}'))
    train(world, run, *flags, "--steps", "4", "--resume", reward="distinct")
    assert f"The answers of {data} or their columns differ from those of step 3" in capsys.readouterr().out


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
    assert "Stopping after this step. Press Ctrl-C again to stop now and discard the step." in rest and "Traceback" not in rest
    assert json.loads((run / f"checkpoints/step-{done}/state.json").read_text())["step"] == done
    assert not (run / "model").exists()
    train(world, run, "--steps", str(done + 1), "--rollout.max-tokens", "16", "--resume")
    assert [row["step"] for row in metrics(run)] == [*range(done + 2)]


def test_a_run_past_its_last_step_is_not_continued(world, tmp_path, capsys):
    train(world, tmp_path / "run", "--steps", "2", "--checkpoint.every", "1")
    assert "beyond steps = 1" in refused(capsys, *arguments(world, tmp_path / "run", "--resume", "--steps", "1"))
    train(world, tmp_path / "run", "--resume", "--steps", "3", "--checkpoint.every", "1")
    assert "Continuing after step 2." in capsys.readouterr().out
