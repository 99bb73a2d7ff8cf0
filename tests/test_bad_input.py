"""Whatever a user gets wrong ends in one sentence with a remedy and exit code 2, and nothing is left half-written."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from small_runs import Command, arguments, metrics, refused, train
from sparse_rl import UserError
from sparse_rl.train.run_folder import RunFolder

QUICK = ["--method", "dense", "--rollout.max-tokens", "4"]


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A run of one step, to be looked at and copied."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(world, run, *QUICK, "--steps", "1")
    return run


@pytest.fixture
def run(trained, tmp_path):
    """A run of one step, to be continued, replaced or damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Before anything is written

STARTS = {
    "samples": (
        ["--rollout.samples-per-prompt", "1"],
        " is invalid: advantages compare rollouts of a prompt, so it must be at least 2. Try 8.",
    ),
    "updates": (
        ["--optimizer.updates-per-step", "3"],
        "must not exceed rollout.prompts_per_step = 2, because each update needs at least one group: lower updates_per_step or raise prompts_per_step.",
    ),
    "policy": (["--kv.policy", "rvk"], "Unknown KV policy 'rvk' (did you mean 'rkv'?)"),
    "correction": (["--method", "smd", "--correction.preset", "tis"], "has no effect with method = smd"),
    "data": (["--data.train", "{world}/problem.jsonl"], "did you mean {world}/problems.jsonl?"),
    "row": (["--data.train", "{tmp}/torn.jsonl"], "{tmp}/torn.jsonl:2: the line is not valid JSON"),
    "test data": (
        ["--data.test", "{tmp}/torn.jsonl", "--eval.problems", "1"],
        "{tmp}/torn.jsonl:2: the line is not valid JSON",
    ),
    "context": (
        ["--data.train", "{tmp}/long.jsonl"],
        "Problem 2 of {tmp}/long.jsonl has 301 tokens, and with max_tokens = 24 exceeds the model's context of 256: shorten the prompt, or skip 1 of 2 problems with --data.max-prompt-tokens 232.",
    ),
    "test context": (
        ["--data.test", "{tmp}/long.jsonl", "--eval.problems", "2"],
        "Problem 2 of the test problems, {tmp}/long.jsonl, has 301 tokens",
    ),
    "max_tokens": (["--rollout.max-tokens", "250"], " exceeds the model's context of 256: max_tokens = 247 fits."),
    "max_prompt_tokens": (
        ["--data.train", "{tmp}/long.jsonl", "--data.max-prompt-tokens", "2"],
        "Every prompt of {tmp}/long.jsonl has more than data.max_prompt_tokens = 2 tokens (the shortest",
    ),
    "device": (["--model.device", "nonsense"], "Device 'nonsense' cannot be used"),
    "model": (["--model.path", "{tmp}/nowhere"], "There is no model folder"),
    "adapter": (["--model.lora.rank", "2", "--model.lora.targets", "qq"], "matches no layer of the model: try all-linear."),
    "logger": (
        ["--log.to", '["tensorboard", "trackio"]'],
        "log.to = trackio needs an optional package: pip install 'sparse-rl[trackio]'.",
    ),
    "no answers": (
        ["--data.train", "{tmp}/bare.jsonl", "--reward.function", "exact"],
        "{tmp}/bare.jsonl has no answer column, which reward exact needs (found level)",
    ),
    "no reward": (
        ["--reward.function", "none"],
        "has no default reward function: set --reward.function, such as math_answer, exact or my_rewards:graded.",
    ),
    "reward": (["--reward.function", "{world}/rewards.py:sum"], "did you mean sums?"),
    "resume": (
        ["--resume"],
        "{tmp}/run has no run to resume: omit --resume, or pass the --run-dir of the run. For a comparison, also pass its recipe.",
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_run_that_cannot_start_says_why_and_leaves_nothing(world, tmp_path, name, capsys):
    (tmp_path / "torn.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1=", "level": 1}\n')
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 300, "answer": "2"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags, sentence = STARTS[name]
    places = {"world": world, "tmp": tmp_path}
    flags = [flag.format(**places) for flag in flags]
    assert sentence.format(**places) in refused(capsys, *arguments(world, tmp_path / "run", *flags))
    assert not (tmp_path / "run").exists()


def test_a_run_is_neither_mixed_into_nor_lost_by_accident(world, run, capsys):
    before = contents(run)
    again = arguments(world, run, *QUICK)
    assert refused(capsys, *again) == f"{run} already contains a run: use --resume, --overwrite or another --run-dir."
    budget = refused(capsys, *again, "--resume", "--kv.budget", "24")
    assert (
        budget
        == f"kv.budget is 24 now but was 20 in {run}: resume with the same value, or start a new run with another --run-dir."
    )
    missing = refused(capsys, *again, "--resume", "--steps", "9", "--data.test", str(world / "problems.jsonl"))
    assert f"data.test is {world / 'problems.jsonl'} now but was not set" in missing
    assert "choose one" in refused(capsys, *again, "--resume", "--overwrite")
    assert "nope" in refused(capsys, *again, "--overwrite", "--reward.function", f"{world / 'rewards.py'}:nope")
    assert contents(run) == before
    train(world, run, *QUICK, "--overwrite", "--checkpoint.every", "2")
    assert [row["step"] for row in metrics(run)] == [0, 1, 2] and not (run / "checkpoints/step-1").exists()
    assert not (run / ".replaced").exists()


def test_a_resume_that_cannot_start_changes_nothing(world, run, capsys):
    before = contents(run)
    sentence = refused(capsys, *arguments(world, run, *QUICK, "--resume", "--steps", "9", reward="nowhere"))
    assert "no nowhere in" in sentence
    (run / "reward.log").unlink()
    assert contents(run) == {name: content for name, content in before.items() if name != "reward.log"}


def test_a_folder_that_is_not_a_run_is_never_touched(world, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    (tmp_path / "file").write_text("also mine")
    for place in ("thesis", "file"):
        for flags in ([], ["--overwrite"], ["--resume"]):
            sentence = refused(capsys, *arguments(world, tmp_path / place, *flags))
            compared = ", or pass the recipe too if it holds a comparison" if "--resume" in flags else ""
            assert sentence == f"{tmp_path / place} exists and is not a run folder: set another --run-dir{compared}."
    assert "cannot be written" in refused(capsys, *arguments(world, tmp_path / "file/run"))
    assert contents(tmp_path) == {"thesis/chapter.tex": b"years of work", "file": b"also mine"}


def test_what_an_empty_folder_was_it_stays(world, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    refused(capsys, *arguments(world, tmp_path / "run", "--model.device", "nonsense"))
    assert list(tmp_path.iterdir()) == [tmp_path / "run"] and not list((tmp_path / "run").iterdir())


# Rewards


def test_a_reward_that_fails_on_some_samples_costs_only_those(world, tmp_path, capsys):
    run = tmp_path / "run"
    train(world, run, *QUICK, "--rollout.samples-per-prompt", "6", "--reward.timeout-s", "0.3", "--reward.timeout", "none",
          reward="fails")  # fmt: skip
    for step, row in enumerate(metrics(run)[1:], 1):
        rollouts = pq.read_table(run / f"rollouts/step-{step}.parquet").to_pylist()
        kinds = [sum(map(ord, rollout["text"])) % 10 for rollout in rollouts]
        assert row["reward/errors"] == sum(kind in (0, 2, 4) for kind in kinds)
        assert row["reward/timeouts"] == kinds.count(1) and row["reward/no_verdict"] == kinds.count(3)
        for rollout, kind in zip(rollouts, kinds, strict=True):
            assert rollout["verdict"] == (rollout["reward"] is not None) == (kind >= 5)
            assert rollout["verdict"] or rollout["advantage"] == 0
        assert row["policy/skipped_updates"] == 0
    both = metrics(run)[1:]
    assert all(sum(row[f"reward/{key}"] for row in both) > 0 for key in ("errors", "timeouts", "no_verdict"))
    assert "the reward failed on" in capsys.readouterr().out and "ZeroDivisionError" in (run / "reward.log").read_text()


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("raises", "RuntimeError: out of ideas"),
        ("hangs", "over reward.timeout_s"),
        ("returns_nan", "ValueError: the reward returned nan"),
        ("returns_two", "ValueError: the reward returned 2 values for 1 completion"),
    ],
)
def test_a_reward_that_fails_on_the_first_gold_ends_the_run_before_its_first_rollout(world, tmp_path, reward, why, capsys):
    run = tmp_path / "run"
    sentence = refused(capsys, *arguments(world, run, *QUICK, "--reward.timeout-s", "0.2", reward=reward))
    assert sentence == f"The reward fails on the first reference answer ({why}): fix reward.function."
    assert not (run / "metrics.jsonl").exists() and not list((run / "rollouts").iterdir())


def test_a_reward_that_asks_for_the_answer_of_data_without_answers_names_the_column_option(world, tmp_path, capsys):
    (tmp_path / "gold.jsonl").write_text('{"prompt": "1:02+03=", "gold": "05"}\n')
    (tmp_path / "graded.py").write_text("def graded(prompts, completions, answer, **columns):\n    return [0.0]\n")
    flags = ["--data.train", str(tmp_path / "gold.jsonl"), "--reward.function", f"{tmp_path}/graded.py:graded"]
    sentence = refused(capsys, *arguments(world, tmp_path / "run", *QUICK, *flags, "--dry-run"))
    assert "missing 1 required positional argument: 'answer'" in sentence
    assert sentence.endswith("set data.answer_column, or fix reward.function.")


def test_a_reward_that_fails_on_resume_is_warned_of_and_may_come_back(world, run, capsys):
    train(world, run, *QUICK, "--steps", "2", "--resume", reward="raises")
    assert "warning: The reward fails on the first reference answer (RuntimeError: out of ideas)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("only_gold", ": RuntimeError: no gold:"),
        ("hangs_on_texts", " (None or timeout):"),
        ("returns_none", " (None or timeout):"),
    ],
)
def test_a_reward_that_fails_on_all_samples_ends_the_run(world, tmp_path, reward, why, capsys):
    run = tmp_path / "run"
    sentence = refused(
        capsys, *arguments(world, run, *QUICK, "--reward.timeout-s", "0.2", "--reward.workers", "2", reward=reward)
    )
    assert sentence.startswith("The reward gave no verdict for any of 4 rollouts")
    assert why in sentence and sentence.endswith("fix reward.function.")
    assert [row["step"] for row in metrics(run)] == [0] and not list((run / "rollouts").iterdir())


def test_processes_of_the_reward_die_with_a_run_that_fails(world, tmp_path, capsys):
    run = tmp_path / "run"
    assert "not finite" in refused(capsys, *arguments(world, run, *QUICK, "--optimizer.lr", "1e30", reward="tells_its_pid"))
    pids = {int(line.split()[1]) for line in (run / "reward.log").read_text().splitlines()}
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_rewards_that_never_differ_are_warned_of(world, tmp_path, capsys):
    train(world, tmp_path / "run", *QUICK, "--steps", "5", reward="same")
    assert "Step 5: no group had two different rewards for 5 steps, so nothing is learned" in capsys.readouterr().out
    assert [row["policy/skipped_updates"] for row in metrics(tmp_path / "run")[1:]] == [1] * 5


# Numbers


@pytest.mark.parametrize(
    "flags",
    [["--loss.kl-coef", "1e38", "--optimizer.lr", "1"], ["--loss.kl-coef", "1e38"]],
    ids=["loss", "gradient"],
)
def test_updates_that_are_not_finite_are_skipped_and_then_end_the_run(world, tmp_path, flags, capsys):
    """The first step is sound, the others are not: the weights stay as it left them and its checkpoint is named."""
    run = tmp_path / "run"
    flags = [*QUICK, *flags, "--checkpoint.every", "1", "--checkpoint.keep", "1", "--optimizer.max-skipped-updates", "3"]
    with pytest.raises(SystemExit) as end:
        train(world, run, *flags, "--steps", "9")
    out, err = capsys.readouterr()
    assert end.value.code == 2 and err.count("\n") == 1
    assert "Loss or gradient was not finite in 3 consecutive updates: lower optimizer.lr or the loss coefficients; " in err
    assert f"the last good checkpoint is {run / 'checkpoints/step-1'}." in err
    assert out.count("skipped 1 of 1 update, because loss or gradient was not finite.") == 3
    assert [row["policy/skipped_updates"] for row in metrics(run)[1:]] == [0, 1, 1, 1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-1"]


def test_weights_that_are_broken_are_named(world, tmp_path, capsys):
    shutil.copytree(world / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    sentence = refused(capsys, *arguments(world, tmp_path / "run", *QUICK, "--model.path", str(tmp_path / "model")))
    assert " contains values that are not finite. Copy or download them again, or use an earlier checkpoint." in sentence


# The disk


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "state.json"])
@pytest.mark.parametrize("size", [0, 300])
def test_a_damaged_checkpoint_is_named(world, run, tmp_path, file, size, capsys):
    path = run / "checkpoints/step-1" / file
    path.write_bytes(path.read_bytes()[: min(size, path.stat().st_size // 2)])
    sentence = refused(capsys, *arguments(world, run, *QUICK, "--resume"))
    sentences = (
        [sentence, refused(capsys, "export", str(run), str(tmp_path / "out"))] if file == "__0_0.distcp" else [sentence]
    )
    for each in sentences:
        assert each.startswith(f"{run / 'checkpoints/step-1'} is damaged: {file} ")
    assert sentence.endswith(" No other checkpoint is intact: start over with --overwrite, or use another --run-dir.")


def test_a_checkpoint_of_an_older_version_is_named(world, run, capsys):
    (run / "checkpoints/step-1/optimizer.pt").touch()
    assert "was written by an older version" in refused(capsys, *arguments(world, run, *QUICK, "--resume"))


def test_a_full_disk_costs_only_the_checkpoint_that_did_not_fit(world, run):
    before = contents(run / "checkpoints")
    largest = max(map(len, before.values()))
    code, output = Command(arguments(world, run, *QUICK, "--resume"), file_bytes=largest // 2).end()
    assert code == 2 and "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith(
        "sparse-rl: The checkpoint of step 2 could not be written (File too large): raise the file size limit (ulimit -f)"
    )
    assert last.endswith(f"(ulimit -f) and continue from {run / 'checkpoints/step-1'} with --resume.")
    assert contents(run / "checkpoints") == before and os.listdir(run / "checkpoints") == ["step-1"]
    train(world, run, *QUICK, "--resume")
    assert (run / "checkpoints/step-2").is_dir()


def test_a_last_checkpoint_that_does_not_fit_does_not_cost_the_model(world, trained, tmp_path):
    run = tmp_path / "run"
    largest = max(map(len, contents(trained / "checkpoints").values()))
    code, output = Command(arguments(world, run, *QUICK, "--steps", "1"), file_bytes=largest - 1).end()
    assert code == 2 and output.strip().splitlines()[-1].endswith("(ulimit -f) and start again.")
    assert contents(run / "model") == contents(trained / "model") and not os.listdir(run / "checkpoints")


def test_a_disk_that_seems_too_small_is_warned_of_before_the_first_step(world, run, capsys, monkeypatch):
    """A float32 weight takes 12 bytes of each checkpoint and 4 of the model."""
    weights = sum(weight.numel() for weight in load_file(run / "model/model.safetensors").values())
    disk = SimpleNamespace(free=16 * weights, total=1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)

    def said(*flags):
        capsys.readouterr()
        train(world, run, *QUICK, *flags)
        return [line for line in capsys.readouterr().out.splitlines() if "at once" in line]

    assert said("--steps", "1", "--overwrite") == []
    disk.free -= 1
    assert len(said("--steps", "1", "--overwrite")) == 1
    disk.free = 28 * weights - 1  # the last of two, beside the first
    assert "(2 at once)" in said("--steps", "2", "--checkpoint.every", "1", "--overwrite")[0]
    disk.free = 16 * weights
    assert said("--steps", "3", "--checkpoint.every", "1", "--resume") == []  # one more beside the two that are there


def test_a_disk_too_full_for_a_line_ends_in_a_sentence(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics = Path("/dev/full")
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\): free some disk space and continue"):
        folder.append_metrics(1, {"reward/mean": 1.0})
