"""One writer per run folder, and a sentence for everything a disk refuses."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from small_runs import CONTEXT, Command, arguments, metrics, one_thread, refused, train
from sparse_rl import backup, disk
from sparse_rl.cli import build_parser, main
from sparse_rl.config import Config, from_flags
from sparse_rl.errors import UserError
from sparse_rl.train import checkpoint_folder, lock
from sparse_rl.train import run as training
from sparse_rl.train.distributed import launch
from sparse_rl.train.lock import Holder, RunLock, this_process
from sparse_rl.train.run_folder import RunFolder

QUICK = ["--method", "dense", "--rollout.max-tokens", "8", "--reward.workers", "0", "--checkpoint.every", "1"]
ELSEWHERE = {"host": "node7", "pid": 4321, "user": "ana", "boot": "another machine"}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(lock, "EXPIRES_S", 0.5)
    monkeypatch.setattr(lock, "SETTLE_S", 0.05)


def held_by(folder: Path, **who) -> Holder:
    """A lock that such a process has left."""
    folder.mkdir(exist_ok=True)
    holder = replace(this_process(""), **who)
    (folder / "lock").write_text(json.dumps(asdict(holder)))
    return holder


def test_a_run_that_is_live_is_read_and_not_written(world, tmp_path, capsys):
    """Neither --overwrite nor --resume; killed, it is resumed without a word."""
    run = tmp_path / "run"
    live = Command(arguments(world, run, *QUICK, "--steps", "500"))
    live.read_to("step 2/500")
    live.signal(signal.SIGSTOP)  # which saves this test's time and changes nothing
    for flag in ("--overwrite", "--resume"):
        sentence = refused(capsys, *arguments(world, run, *QUICK, "--steps", "500", flag))
        holder = json.loads((run / "lock").read_text())
        assert sentence.startswith(
            f"{run} is in use by process {live.process.pid} of {holder['user']} on {socket.gethostname()}"
        )
        assert sentence.endswith(" wait for it, stop it, or use another --run-dir.")
    main([*arguments(world, run, *QUICK, "--steps", "500"), "--dry-run"])
    main(["report", str(run), "--out", str(tmp_path / "page.html")])
    main(["export", str(run), str(tmp_path / "model"), "--step", str(checkpoint_folder.steps_in(run / "checkpoints")[0])])
    live.signal(signal.SIGKILL)
    live.end()
    done = checkpoint_folder.steps_in(run / "checkpoints")[-1]
    train(world, run, *QUICK, "--steps", str(done + 1), "--resume")
    assert [row["step"] for row in metrics(run)] == [*range(done + 2)]
    assert not (run / "lock").exists() and "may be in use" not in capsys.readouterr().err


def test_every_arm_of_a_comparison_is_locked_before_any_work(world, tmp_path, capsys):
    both = tmp_path / "both"
    both.mkdir()
    held_by(both / "naive")
    with (both / "naive/lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sentence = refused(capsys, *arguments(world, both, *QUICK, "--compare", '["dense", "naive"]'))
    assert sentence.startswith(f"{both / 'naive'} is in use by process {os.getpid()}")
    assert not (both / "dense").exists()


def test_a_process_that_is_gone_holds_nothing(tmp_path):
    """Also where a child of it still has the file open, or its pid is another's now."""
    held_by(tmp_path, ticks="1")
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mine = RunLock(tmp_path)
        mine.acquire()
        mine.release()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("flock", [True, False])
def test_a_process_of_another_machine_holds_it_while_it_shows_life(tmp_path, flock, monkeypatch, capsys):
    if not flock:

        def unsupported(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", unsupported)
    holder = held_by(tmp_path, **ELSEWHERE)
    ended = threading.Event()

    def live():
        while not ended.wait(0.05):
            os.utime(tmp_path / "lock")

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(UserError, match=f"in use by process 4321 of ana on node7, since {holder.since.replace('+', '.')}"):
        RunLock(tmp_path).acquire()
    ended.set()
    thread.join()
    mine = RunLock(tmp_path)
    mine.acquire()
    assert json.loads((tmp_path / "lock").read_text())["token"] == mine.holder.token
    mine.release()
    assert ", whose heartbeat stopped. This run takes over the folder." in capsys.readouterr().err


def test_a_start_of_the_same_launch_takes_over_at_once(tmp_path, capsys):
    held_by(tmp_path, **ELSEWHERE, launch="job 7")
    mine = RunLock(tmp_path, "job 7")
    mine.acquire()
    mine.release()
    assert "heartbeat" not in capsys.readouterr().err


@pytest.mark.parametrize("other", ["socket.gethostname", "_boot", "_namespace", "_ticks"])
def test_a_launch_without_an_id_has_a_name_of_its_own(monkeypatch, other):
    """Two launchers may have the same pid: in two containers, on two machines, or one after the other."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    name = launch()
    assert launch() == name and str(lock._ticks(os.getppid())) in name.split()
    monkeypatch.setattr(f"sparse_rl.train.lock.{other}", lambda *_: "another")
    assert launch() != name
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    assert launch() == "job 7"


def test_a_run_that_has_lost_its_folder_ends(tmp_path):
    """It was stopped for so long that another machine took over."""
    folder = RunFolder(tmp_path)
    with folder.locked():
        folder.append_metrics(1, {})
        (tmp_path / "lock").unlink()
        held_by(tmp_path, **ELSEWHERE)
        thread = folder.lock._thread
        thread.join(5)
        with pytest.raises(UserError, match="was taken over by another run"):
            folder.append_metrics(2, {})
    assert json.loads((tmp_path / "lock").read_text())["host"] == "node7"


def test_a_lock_that_was_deleted_is_there_again(tmp_path):
    mine = RunLock(tmp_path)
    mine.acquire()
    (tmp_path / "lock").unlink()
    for _ in range(200):
        if (tmp_path / "lock").exists() and (tmp_path / "lock").read_text():
            break
        threading.Event().wait(0.02)
    with pytest.raises(UserError, match="is in use by process"):
        RunLock(tmp_path).acquire()
    mine.release()


def test_of_many_that_start_at_once_one_gets_the_folder(tmp_path):
    held_by(tmp_path, ticks="1")  # a stale one, which all of them want to replace
    start, ended, results = CONTEXT.Barrier(4), CONTEXT.Barrier(4), CONTEXT.Queue()
    starters = [CONTEXT.Process(target=start_at_once, args=(tmp_path, start, ended, results)) for _ in range(4)]
    for each in starters:
        each.start()
    assert sorted(results.get(timeout=60) for _ in starters) == ["refused"] * 3 + ["taken"]
    for each in starters:
        each.join()


def start_at_once(folder, start, ended, results) -> None:
    mine = RunLock(folder)
    start.wait()
    try:
        mine.acquire()
        results.put("taken")
    except UserError:
        results.put("refused")
    ended.wait()
    mine.release()


def test_a_launch_that_starts_again_goes_on_with_the_run_it_has_begun(world, tmp_path):
    """It was asked to replace the run before, and has."""
    flags = (tmp_path / "run", *QUICK)
    train(world, *flags, "--seed", "1", "--steps", "1")
    for steps in ("1", "2"):
        config = parsed(arguments(world, *flags, "--steps", steps))
        with one_thread():
            training.train(config, resume=False, overwrite=True, launch="job 7")
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]


def parsed(words: list[str]) -> Config:
    return from_flags(build_parser().parse_args(words), Config)


def test_a_run_that_a_killed_start_was_to_replace_is_read_as_it_was(world, tmp_path, capsys):
    run = tmp_path / "run"
    train(world, run, *QUICK, "--steps", "1")
    backup.move_out(run)
    (run / "config.toml").write_text("seed = 5")
    main(["export", str(run), str(tmp_path / "model")])
    assert "the previous run is restored" in capsys.readouterr().err
    assert not [*run.glob(".replaced*")] and checkpoint_folder.steps_in(run / "checkpoints") == [1]


# What a disk refuses


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "(No space left on device): free some disk space or set another"),
        (errno.EDQUOT, "(Disk quota exceeded): free some of your quota or"),
        (errno.EACCES, "(Permission denied): get write permission or"),
        (errno.EPERM, "(Operation not permitted): get write permission or"),
        (errno.EROFS, "(Read-only file system): mount the disk for writing or"),
    ],
)
def test_every_refusal_of_a_disk_has_its_own_sentence(tmp_path, number, sentence):
    with pytest.raises(UserError) as error, RunFolder(tmp_path).writing():
        raise OSError(number, os.strerror(number))
    assert sentence in str(error.value)


def test_a_reason_that_a_library_hides_is_found(tmp_path):
    """torch says "unexpected pos" of a full disk, safetensors prints a Rust struct."""
    with pytest.raises((RuntimeError, OSError)) as error, open("/dev/full", "wb", buffering=0) as full:
        torch.save(torch.zeros(1000), full)
    assert disk.refusal(error.value, tmp_path) == ("No space left on device", "free some disk space")
    rust = RuntimeError('I/O error: Os { code: 122, kind: QuotaExceeded, message: "Disk quota exceeded" }')
    assert disk.refusal(rust, tmp_path) == ("Disk quota exceeded", "free some of your quota")


def test_a_reason_that_nobody_knows_is_no_lack_of_space(tmp_path):
    assert disk.refusal(RuntimeError("unexpected pos 704 vs 598"), tmp_path) == ("unexpected pos 704 vs 598", "check the disk")


def test_a_full_disk_is_found_on_systems_without_fallocate(small_disk, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert disk.refusal(RuntimeError("unexpected pos"), small_disk / "run") == (
        "No space left on device",
        "free some disk space",
    )


@pytest.fixture
def small_disk(tmp_path):
    """600 KiB: one checkpoint fits."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_disk_that_is_really_full_is_called_so_and_costs_only_the_last_checkpoint(world, small_disk):
    run = small_disk / "run"
    code, output = Command(arguments(world, run, *QUICK)).end()
    last = output.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in output
    assert "could not be written (No space left on device): free some disk space and" in last
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    train(world, run, *QUICK, "--resume")
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    code, output = Command(arguments(world, run, *QUICK, "--resume", "--steps", "3")).end()
    assert code == 2 and "(Read-only file system): mount the disk for writing and continue with --resume" in output


def test_an_old_checkpoint_that_cannot_be_removed_is_no_end_of_a_run(world, tmp_path, capsys):
    run = tmp_path / "run"
    train(world, run, *QUICK, "--checkpoint.keep", "1", "--checkpoint.best", "eval/none", "--steps", "1")
    kept = run / "checkpoints/step-1"
    if subprocess.run(["chattr", "+i", kept], capture_output=True).returncode:
        pytest.skip("making a folder immutable needs root and a file system that can")
    try:
        train(world, run, *QUICK, "--checkpoint.keep", "1", "--checkpoint.best", "eval/none", "--steps", "3", "--resume")
    finally:
        subprocess.run(["chattr", "-i", kept], check=True)
    assert checkpoint_folder.steps_in(run / "checkpoints") == [1, 3]
    assert f"The old checkpoint {kept} could not be removed" in capsys.readouterr().out


def test_a_start_that_fails_leaves_nothing_while_other_ranks_still_write(tmp_path):
    """Ranks that unwind write into logs/ for a moment: the folder goes with what they write."""
    folder, over = RunFolder(tmp_path / "run"), threading.Event()

    def late():
        ends, number = time.monotonic() + 0.3, 0
        while time.monotonic() < ends:
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / f"run/logs/rank-{(number := number + 1)}.log").write_text("late\n")
        over.set()

    def start():
        with folder.locked(), folder.opening(Config(), resume=False, overwrite=False):
            folder.note_launch("mine")
            threading.Thread(target=late).start()
            raise ValueError("no reward")

    with pytest.raises(ValueError, match="no reward"):
        start()
    over.wait()
    assert not (tmp_path / "run").exists()
