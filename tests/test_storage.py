"""A run on shared storage is the run on a disk: a real S3 server, a real client, the same files and the same weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from runs import arguments, metrics, one_thread, train
from sparse_rl.cli import main
from sparse_rl.train import checkpoint, storage
from sparse_rl.train.folder import RunFolder
from storage import s3_bucket

FLAGS = ["--checkpoint.every", "1", "--checkpoint.keep", "1", "--rollout.max-tokens", "8"]


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as (address, fs):
        yield address, fs


def command(*words) -> None:
    """As a process of its own would run it: with no working copy yet."""
    storage.working_copy.cache_clear()
    with one_thread():
        main([*map(str, words)])


def test_a_run_resumes_from_storage_and_is_the_one_on_a_disk(world, tmp_path, bucket, capsys):
    address, fs = bucket
    run, disk = f"{address}/runs/mine", tmp_path / "disk"
    command(*arguments(world, run, *FLAGS, "--steps", "1"))
    assert fs.exists("shared/runs/mine/checkpoints/step-1/state.json")
    fs.pipe_file("shared/runs/mine/checkpoints/step-9/__0_0.distcp", b"PK")  # half of a checkpoint
    fs.pipe_file("shared/runs/mine/rollouts/step-2.parquet", b"PAR1")
    command("train", "--resume", "--run-dir", run, "--steps", "3")
    assert "Continuing after step 1" in capsys.readouterr().out
    train(world, disk, *FLAGS, "--steps", "3")

    there = {path.removeprefix("shared/runs/mine/") for path in fs.find("shared/runs/mine")}
    here = {str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file()}
    assert there - {"reward.log"} == here - {"reward.log"}
    lines = fs.cat_file("shared/runs/mine/metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["reward/mean"] for line in lines[1:]] == [row["reward/mean"] for row in metrics(disk)[1:]]

    command("export", run, tmp_path / "exported")
    for name, weight in load_file(disk / "model/model.safetensors").items():
        assert torch.equal(weight, load_file(tmp_path / "exported/model.safetensors")[name])
    command("report", run, "--out", tmp_path / "report.html")
    assert "mine" in (tmp_path / "report.html").read_text()


def test_a_run_that_is_there_is_not_lost_by_accident(world, bucket, capsys):
    run = f"{bucket[0]}/runs/taken"
    command(*arguments(world, run, *FLAGS, "--steps", "1"))
    with pytest.raises(SystemExit):
        command(*arguments(world, run, *FLAGS, "--steps", "1"))
    assert f"{run} is a run already: use --resume, --overwrite or another --run-dir." in capsys.readouterr().err
    command(*arguments(world, run, *FLAGS, "--steps", "2", "--checkpoint.every", "2", "--overwrite"))
    assert checkpoint.steps_in(f"{run}/checkpoints") == [2]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--run-dir", "s3://nowhere/run"], "s3://nowhere/run cannot be written ("),
        (["--run-dir", "nfs4://host/run"], "nfs4://host/run cannot be a run folder (Protocol not known: nfs4)"),
        (["--run-dir", "gs://bucket/run"], "gs://bucket/run needs a package that is not installed: Please install gcsfs"),
        (["--run-dir", "s3://shared/both", "--compare", '["dense", "naive"]'], "with --run-dir on shared storage name one"),
        (["--run-dir", "s3://shared/none", "--resume"], "There is no run in s3://shared/none to resume"),
    ],
)
def test_bad_addresses_are_said_in_a_sentence(world, bucket, flags, sentence, capsys):
    storage.working_copy.cache_clear()
    with pytest.raises(SystemExit) as error:
        main([*arguments(world, "unused", *FLAGS, "--steps", "1"), *flags])
    err = capsys.readouterr().err.strip()
    assert error.value.code == 2 and sentence in err and "\n" not in err


def test_a_page_of_a_run_that_is_elsewhere_needs_a_place(world, bucket, capsys):
    with pytest.raises(SystemExit):
        command("report", f"{bucket[0]}/runs/mine")
    assert "is not on this machine: name a file for the page with --out, or use --serve." in capsys.readouterr().err


def test_storage_that_does_not_answer_for_a_while_is_no_end_of_a_run(bucket, monkeypatch):
    address, fs = bucket
    folder = RunFolder(f"{address}/runs/slow")
    said: list[str] = []
    (folder.path / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(storage, "EVERY_S", 0.0)
    monkeypatch.setattr(folder.remote.fs, "put_file", lambda *_: (_ for _ in ()).throw(ConnectionError("reset")))
    folder.push_if_due(said.append)
    assert "cannot be written (reset)" in said[0] and not fs.exists("shared/runs/slow/metrics.jsonl")
    monkeypatch.undo()
    folder.push_if_due(said.append)
    folder.push()
    assert len(said) == 1 and fs.cat_file("shared/runs/slow/metrics.jsonl") == b"{}\n"
