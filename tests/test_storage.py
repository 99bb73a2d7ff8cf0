"""A run on shared storage is the run on a disk: a real S3 server, a real client, the same files and the same weights."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from small_runs import arguments, metrics, one_thread, train
from sparse_rl.cli import main
from sparse_rl.errors import StorageUnavailable, UserError
from sparse_rl.train import checkpoint, checkpoint_folder, lock, storage
from sparse_rl.train.run_folder import RunFolder
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
    assert f"{run} already contains a run: use --resume, --overwrite or another --run-dir." in capsys.readouterr().err
    command(*arguments(world, run, *FLAGS, "--steps", "2", "--checkpoint.every", "2", "--overwrite"))
    assert checkpoint_folder.steps_in(f"{run}/checkpoints") == [2]


def test_what_is_no_run_is_left_alone(world, bucket, capsys):
    """Also where it looks like a part of one."""
    address, fs = bucket
    fs.pipe_file("shared/project/model/weights.safetensors", b"1")
    fs.pipe_file("shared/project/checkpoints/other.pt", b"2")
    for flags in ([], ["--overwrite"], ["--resume"]):
        with pytest.raises(SystemExit):
            command(*arguments(world, f"{address}/project", *FLAGS, "--steps", "1", *flags))
        assert "s3://shared/project exists and is not a run" in capsys.readouterr().err
    assert len(fs.find("shared/project")) == 2


def test_a_run_that_cannot_start_leaves_nothing_behind(world, tmp_path, bucket):
    address, fs = bucket
    flags = [*FLAGS, "--steps", "1", "--model.path", tmp_path]
    with pytest.raises(SystemExit):
        command(*arguments(world, f"{address}/runs/failed", *flags))
    assert not fs.exists("shared/runs/failed")


def test_a_run_killed_after_a_checkpoint_has_lost_no_line(world, tmp_path, bucket, monkeypatch):
    """What is said of the steps before it is there when the checkpoint is."""
    address, fs = bucket
    save = checkpoint.save

    def killed(*args):
        save(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", killed)
    monkeypatch.setattr(
        RunFolder, "begun", property(lambda self: False, lambda *_: None), raising=False
    )  # nothing is said after
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        command(*arguments(world, f"{address}/runs/killed", *FLAGS, "--checkpoint.every", "2", "--steps", "4"))
    lines = fs.cat_file("shared/runs/killed/metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert fs.exists("shared/runs/killed/checkpoints/step-2/state.json")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--run-dir", "s3://nowhere/run"], "s3://nowhere/run cannot be written ("),
        (["--run-dir", "nfs4://host/run"], "nfs4://host/run cannot be a run folder (Protocol not known: nfs4)"),
        (["--run-dir", "gs://bucket/run"], "gs://bucket/run needs a package that is not installed (Please install gcsfs"),
        (["--run-dir", "ftp://127.0.0.1:1/run"], "ftp://127.0.0.1:1/run cannot be a run folder ("),
        (
            ["--run-dir", "s3://shared", "--overwrite"],
            " is the root of a storage, not a folder: pass a folder, such as s3://shared/runs",
        ),
        (["--run-dir", "s3://"], " is the root of a storage, not a folder: pass a folder, such as "),
        (["--run-dir", "s3://shared/runs/seed[12]"], " is not a valid run folder: its name must not contain *, ? or [."),
        (["--run-dir", "s3://shared/both", "--compare", '["dense", "naive"]'], "on remote storage, pass one --method"),
        (["--run-dir", "s3://shared/none", "--resume"], "s3://shared/none has no run to resume"),
    ],
)
def test_bad_addresses_are_said_in_a_sentence(world, bucket, flags, sentence, capsys):
    storage.working_copy.cache_clear()
    with pytest.raises(SystemExit) as error:
        main([*arguments(world, "unused", *FLAGS, "--steps", "1"), *flags])
    err = capsys.readouterr().err.strip()
    assert error.value.code == 2 and sentence in err and "\n" not in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runs/taken"], " is on remote storage: pass a local file with --out, or a local folder with --figures."),
        (["runs/taken", "--serve"], "is on remote storage"),
        (["runs/none", "--out", "page.html"], "s3://shared/runs/none is not a run folder (no config.toml)"),
    ],
)
def test_pages_of_runs_that_are_elsewhere(bucket, words, sentence, capsys):
    with pytest.raises(SystemExit):
        command("report", f"{bucket[0]}/{words[0]}", *words[1:])
    assert sentence in capsys.readouterr().err


def test_storage_that_does_not_answer_for_a_while_is_no_end_of_a_run(bucket, monkeypatch):
    address, fs = bucket
    folder = RunFolder(f"{address}/runs/slow")
    said: list[str] = []
    (folder.path / "metrics.jsonl").write_text("{}\n")

    def reset(*_):
        raise ConnectionError("reset")

    with monkeypatch.context() as broken:
        broken.setattr(folder.remote.fs, "put_file", reset)
        folder.push_or_warn(said.append)
    assert "cannot be written (reset)" in said[0] and not fs.exists("shared/runs/slow/metrics.jsonl")
    (folder.path / "gone").symlink_to("nothing")  # loggers have files that come and go
    folder.push_or_warn(said.append)
    assert len(said) == 1 and fs.cat_file("shared/runs/slow/metrics.jsonl") == b"{}\n"


def test_checkpoints_are_not_pruned_because_storage_is_silent(bucket, monkeypatch):
    """Many file systems say of what they cannot reach that it does not exist."""
    address, fs = bucket
    folder = f"{address}/runs/silent/checkpoints"
    for step in (1, 2):
        fs.pipe_file(f"shared/runs/silent/checkpoints/step-{step}/state.json", b"{}")
    remote = storage.opened(folder)[0]

    def silent(*_, **__):
        raise OSError("503 Slow Down")

    with monkeypatch.context() as broken:
        broken.setattr(remote, "ls", silent)
        broken.setattr(remote, "exists", lambda path: False)
        with pytest.raises(StorageUnavailable, match=r"cannot be read \(503 Slow Down\)"):
            checkpoint_folder.prune(folder, 1, -1)
    assert checkpoint_folder.steps_in(folder) == [1, 2]


def test_working_copies_of_killed_processes_are_removed(bucket):
    address = f"{bucket[0]}/runs/left"
    script = f"from sparse_rl.train.storage import working_copy; print(working_copy({address!r}).path, flush=True); import os; os._exit(9)"
    left = Path(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip())
    mine = storage.WorkingCopy(address)
    assert left.name == "left" and not left.exists() and mine.path.exists()
    assert storage.WorkingCopy(address).path != mine.path and mine.path.exists()  # that of one who lives stays


def test_a_run_on_storage_has_one_writer(world, bucket, monkeypatch, capsys):
    """While another machine shows life; and it is taken over when that one is gone."""
    monkeypatch.setattr(lock, "EXPIRES_S", 1.0)
    monkeypatch.setattr(lock, "SETTLE_S", 0.1)
    address, fs = bucket
    run, stored = f"{address}/runs/locked", "shared/runs/locked/lock"
    holder = asdict(lock.this_process("")) | {"host": "node7", "boot": "another machine"}
    ended = threading.Event()

    def live():
        while not ended.wait(0.1):
            fs.pipe_file(stored, json.dumps(holder | {"beat": time.monotonic_ns()}).encode())

    fs.pipe_file(stored, json.dumps(holder).encode())
    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(SystemExit):
        command(*arguments(world, run, *FLAGS, "--steps", "1"))
    ended.set()
    thread.join()
    assert f"{run} is in use by process" in capsys.readouterr().err
    command(*arguments(world, run, *FLAGS, "--steps", "1"))
    assert checkpoint_folder.steps_in(f"{run}/checkpoints") == [1] and not fs.exists(stored)


@pytest.mark.parametrize("killed_at", range(4))
def test_a_replacement_on_storage_that_is_killed_is_finished_by_the_next_command(bucket, tmp_path, killed_at):
    """The old run is whole, or the new one has begun and nothing of the old is left."""
    address, fs = bucket
    root = f"shared/runs/killed-{killed_at}"
    old = {"config.toml": b"steps = 1", "metrics.jsonl": b"{}", "checkpoints/step-1/state.json": b"{}"}
    for name, content in old.items():
        fs.pipe_file(f"{root}/{name}", content)
    copy = storage.WorkingCopy(f"{address}/runs/killed-{killed_at}")
    left = iter(range(killed_at))

    class Killed(Exception):
        pass

    def until_killed(what):
        def call(*args, **options):
            if next(left, None) is None:
                raise Killed
            return what(*args, **options)

        return call

    class Dying:
        def __getattr__(self, name):
            what = getattr(fs, name)
            return until_killed(what) if name in ("rm", "rm_file", "pipe_file") else what

    copy.fs = Dying()
    with pytest.raises(UserError):
        copy.replace("steps = 2")
    after = storage.WorkingCopy(f"{address}/runs/killed-{killed_at}")
    assert after.exists and after.config() == ("steps = 2" if killed_at else "steps = 1")
    after.recover()
    now = {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}
    assert now == ({"config.toml": b"steps = 2"} if killed_at else old)
