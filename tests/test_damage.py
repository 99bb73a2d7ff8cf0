"""Damaged run folders: what is damaged is named and not used, and nothing in a checkpoint is ever run."""

import importlib.util
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from small_runs import metrics, one_thread, refused, train, without_clock
from sparse_rl.cli import main
from sparse_rl.train import checkpoint
from sparse_rl.train.metadata import read_index

REPOSITORY = Path(__file__).parents[1]
FLAGS = ["--method", "dense", "--rollout.max-tokens", "8", "--checkpoint.every", "1", "--checkpoint.keep", "3"]


class Payload:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """A run of three steps, to be copied and damaged, and its fourth step in another folder."""
    run, longer = (tmp_path_factory.mktemp("whole") / name for name in ("run", "longer"))
    train(world, run, *FLAGS, "--steps", "3")
    shutil.copytree(run, longer)
    resume(longer)
    return run, longer


def resume(run, steps=4):
    with one_thread():
        main(["train", "--resume", "--run-dir", str(run), "--steps", str(steps)])


def copied(whole, tmp_path):
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def same_weights(left, right):
    mine, theirs = (load_file(each / "model.safetensors") for each in (left, right))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["flipped", "of another step"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(whole, tmp_path, capsys, kind):
    """And the run ends in the weights and metrics of one that was never damaged."""
    run = copied(whole, tmp_path)
    flip(run / "checkpoints/step-3/__0_0.distcp")
    if kind == "of another step":
        shutil.copytree(run / "checkpoints/step-2", run / "checkpoints/step-3", dirs_exist_ok=True)
    resume(run)
    out = capsys.readouterr().out
    assert f"warning: {run / 'checkpoints/step-3'} is damaged: " in out and "Continuing after step 2." in out
    assert ("__0_0.distcp is damaged (checksum mismatch)" if kind == "flipped" else "manifest.json belongs to step 2") in out
    assert same_weights(run / "model", whole[1] / "model")
    assert without_clock(metrics(run)) == without_clock(metrics(whole[1]))
    assert (run / "checkpoints/damaged-step-3").is_dir()


def campaign():
    """The cases of experiments/faults/run_folders.py, which runs the commands on all of them."""
    spec = importlib.util.spec_from_file_location("run_folders", REPOSITORY / "experiments/faults/run_folders.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_folders"] = module  # which its dataclass looks for
    spec.loader.exec_module(module)
    return module


def read(step):
    _, files = checkpoint.checked_state(step)
    checkpoint.read_index(step, files)


def test_all_damage_to_a_checkpoint_is_seen_and_nothing_is_run(whole, tmp_path):
    """Where there is a checksum. Files are damaged as in the campaign: bits, cuts, swaps, pickles, links, pipes, odd values."""
    tried = 0
    for case in campaign().cases(seed=1):
        if case.commands != ("resume", "export") or not case.seen or case.name.startswith(("without checksums", "every")):
            continue
        run = tmp_path / str(tried)
        shutil.copytree(whole[0] / "checkpoints", run / "checkpoints")
        case.damage(run)
        with pytest.raises(checkpoint.Damaged, match="step-3 is damaged: "):
            read(run / "checkpoints/step-3")
        tried += 1
        assert not (tmp_path / "ran").exists(), case.name
    assert tried > 60


def test_an_export_names_the_damage_and_uses_the_checkpoint_before(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    flip(run / "checkpoints/step-3/__0_0.distcp")
    sentence = refused(capsys, "export", str(run), str(tmp_path / "third"), "--step", "3")
    assert "step-3 is damaged: __0_0.distcp" in sentence and sentence.endswith(". Choose another step, such as 2.")
    main(["export", str(run), str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "step-3 is damaged: __0_0.distcp" in out and "Exported step 2 of" in out
    main(["export", str(whole[0]), str(tmp_path / "second"), "--step", "2"])
    assert same_weights(tmp_path / "out", tmp_path / "second")


def test_an_export_of_an_unfinished_run_says_how_far_it_is(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    shutil.rmtree(run / "checkpoints/step-3")
    main(["export", str(run), str(tmp_path / "out")])
    assert "warning: the exported checkpoint is step 2 of 3: the run has no later checkpoint." in capsys.readouterr().out


def test_a_pipe_among_the_rollouts_does_not_stop_the_report(whole, tmp_path):
    run = copied(whole, tmp_path)
    (run / "rollouts/step-2.parquet").unlink()
    os.mkfifo(run / "rollouts/step-2.parquet")
    main(["report", str(run)])
    assert (run / "report.html").exists()


@pytest.mark.parametrize("verified", [True, False], ids=["with checksums", "without"])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "state.json"])
def test_nothing_in_a_checkpoint_is_run(whole, tmp_path, capsys, file, verified):
    run, mark = copied(whole, tmp_path), tmp_path / "ran"
    step = run / "checkpoints/step-3"
    if not verified:
        without_checksums(step)
    (step / file).write_bytes(pickle.dumps(Payload(mark)))
    main(["export", str(run), str(tmp_path / "out")])
    assert "step-3 is damaged" in capsys.readouterr().out and not mark.exists()
    (step / file).unlink()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists(), "the payload would have told"


def test_an_index_cannot_have_a_tensor_unpickled():
    """torch unpickles what an index says is no tensor."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    for names in ({"weights.a": BytesStorageMetadata()}, {"weights.a": 1}, {1: None}):
        with pytest.raises(ValueError, match="it refers to torch.distributed|instead of|not text"):
            read_index(pickle.dumps(Metadata(names, None, {})))


def without_checksums(step):
    """As it was written before there were any."""
    state = json.loads((step / "state.json").read_text())
    del state["manifest"]
    (step / "state.json").write_text(json.dumps(state))
    (step / "manifest.json").unlink()


def test_a_checkpoint_without_checksums_is_read_and_that_is_said(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    without_checksums(run / "checkpoints/step-3")
    resume(run)
    assert "The checkpoint of step 3 has no checksums" in capsys.readouterr().out
    assert same_weights(run / "model", whole[1] / "model")


@pytest.mark.parametrize(
    "value", [{"cursor": -1}, {"cursor": 4.0}, {"cursor": True}, {"best_value": "1"}, {"odd": 1}], ids=str
)
def test_odd_values_of_a_state_are_refused_without_checksums_too(whole, tmp_path, value):
    step = Path(shutil.copytree(whole[0] / "checkpoints/step-3", tmp_path / "step-3"))
    without_checksums(step)
    state = json.loads((step / "state.json").read_text())
    (step / "state.json").write_text(json.dumps(state | value))
    with pytest.raises(checkpoint.Damaged, match=r"state.json cannot be used \("):
        checkpoint.checked_state(step)


def test_metrics_that_cannot_be_read_are_told_and_left_out(whole, tmp_path, capsys):
    """By a run that goes on, and by a report."""
    run = copied(whole, tmp_path)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    odd = [
        b"\xff\xfe\x00\n",
        b'{"step": NaN}\n',
        b'{"step": 1, "reward/mean": "x"}\n',
        b"[]\n",
        b'{"step": ' + b"9" * 400 + b"}\n",
    ]
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], *odd, *lines[2:]]))
    main(["report", str(run), "--out", str(tmp_path / "report.html")])
    assert " that cannot be read" in capsys.readouterr().out
    resume(run)
    out = capsys.readouterr().out
    assert "metrics.jsonl: dropped 5 lines that cannot be read." in out
    assert "metrics.jsonl lacks 1 step (1)" in out
    assert same_weights(run / "model", whole[1] / "model") and [row["step"] for row in metrics(run)] == [0, 2, 3, 4]


@pytest.mark.parametrize("lost", [["state.json"], ["state.json", "manifest.json"]], ids=str)
def test_where_every_checkpoint_lost_its_state_nothing_is_changed(whole, tmp_path, capsys, lost):
    """A copy that left out small files, say. The run would start at step 0 and drop its metrics."""
    run = copied(whole, tmp_path)
    for path in [path for name in lost for path in run.glob(f"checkpoints/*/{name}")]:
        path.unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    sentence = refused(capsys, "train", "--resume", "--run-dir", str(run), "--steps", "4")
    assert (
        "step-1, step-2, step-3 lost state.json. Restore it from a backup, or start over with --overwrite or another --run-dir."
        in sentence
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    shutil.rmtree(run / "model")  # a run that did not come to its end
    assert "step-1, step-2 lost state.json." in refused(capsys, "train", "--resume", "--run-dir", str(run), "--steps", "4")


def test_a_first_checkpoint_that_was_cut_off_is_no_loss(whole, tmp_path, capsys):
    """Killed before its state was written, a run starts again; what is nearly whole is not thrown away."""
    run = copied(whole, tmp_path)
    shutil.rmtree(run / "model")
    for step in (2, 3):
        shutil.rmtree(run / f"checkpoints/step-{step}")
    (run / "checkpoints/step-1/state.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    resume(run)
    assert "The run has no checkpoint and restarts at step 0." in capsys.readouterr().out
    assert (run / "checkpoints/damaged-step-1/manifest.json").exists()
    assert same_weights(run / "model", whole[1] / "model") and [row["step"] for row in metrics(run)] == [0, 1, 2, 3, 4]


def test_where_no_checkpoint_is_sound_nothing_is_changed(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    for step in (1, 2, 3):
        flip(run / f"checkpoints/step-{step}/.metadata")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    sentence = refused(capsys, "train", "--resume", "--run-dir", str(run), "--steps", "4")
    assert "step-3 is damaged" in sentence and "start over with --overwrite" in sentence
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
