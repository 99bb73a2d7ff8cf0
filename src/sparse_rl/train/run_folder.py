"""The run folder, on disk or shared storage: config.toml, metrics.jsonl, xi.jsonl, budget.jsonl, rollouts/, checkpoints/,
model/."""

import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import backup
from ..config import FORMAT, Config, migrated_tables, to_toml
from ..disk import refusal
from ..errors import UserError, first_line, notice
from ..format import counted
from . import resume, storage
from .lock import RunLock
from .rows import missing_steps, read_rows
from .storage import read_plain

LATE_WRITES_S = 1.0
"""Seconds during which other ranks may still write logs into a folder that is being removed, after an error."""


class RunFolder:
    def __init__(self, path: str | Path, *, writes: bool = True):
        """Open a run folder. Pass `writes=False` on ranks and in commands that only read.

        For a run on shared storage, `self.path` is a local working copy.
        """
        self.name, self.writes = storage.place(path), writes
        self.remote = None if isinstance(self.name, Path) else storage.working_copy(self.name)
        self.path = self.remote.path if self.remote else Path(path)
        self.begun = False
        """True once the run is set up. If a start fails before that, its files are removed."""
        self.lock: RunLock | None = None
        self.history: list[str] = []
        """Comments in config.toml that record earlier values of options."""
        self.metrics = self.path / "metrics.jsonl"
        self.xi = self.path / "xi.jsonl"
        self.budget = self.path / "budget.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = storage.within(self.name, "checkpoints")
        self.model = self.path / "model"

    @property
    def exists(self) -> bool:
        """True if the folder holds a run, also one that a killed start with --overwrite moved to the backup."""
        return self.remote.exists if self.remote else backup.current(self.path, "config.toml").exists()

    def stored_config(self) -> dict[str, Any]:
        try:
            here = backup.current(self.path, "config.toml")
            return migrated_tables(tomllib.loads(self.remote.config() if self.remote else read_plain(here).decode()))
        except (FileNotFoundError, NotADirectoryError) as error:
            runs = sorted(self.path.glob("*/config.toml"))
            example = f", such as {runs[0].parent}" if runs else ""
            raise UserError(f"{self.name} is not a run folder (no config.toml): pass a run folder{example}.") from error
        except UserError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            why = first_line(error)
            raise UserError(f"{self.name}/config.toml cannot be read ({why}): fix it, or pass another run folder.") from error

    def config(self) -> Config:
        """Return the configuration stored in config.toml."""
        try:
            return Config(**self.stored_config())
        except TypeError as error:
            raise UserError(
                f"{self.name}/config.toml is not a valid configuration: fix it, or pass another run folder."
            ) from error

    @property
    def is_free(self) -> bool:
        """True if a new run may use the folder: it is missing, empty, or holds only files of a killed start."""
        if self.remote:
            return storage.names_in(self.name) <= {"logs", backup.LOCK}  # logs of ranks whose start failed
        if not self.path.is_dir():
            return not self.path.exists()
        if backup.needs_recovery(self.path):
            return False
        return backup.is_unstarted(self.path) or all(map(backup.is_own, os.listdir(self.path)))

    def refuse_if_taken(self, *, resume: bool, overwrite: bool) -> None:
        """Raise UserError if the folder holds other files, or a run while neither `resume` nor `overwrite` is set."""
        if self.is_free:
            return
        if not self.exists:
            compared = ", or pass the recipe too if it holds a comparison" if resume else ""
            raise UserError(f"{self.name} exists and is not a run folder: set another --run-dir{compared}.")
        if not (resume or overwrite):
            raise UserError(f"{self.name} already contains a run: use --resume, --overwrite or another --run-dir.")

    @contextmanager
    def locked(self, launch: str = "") -> Iterator[None]:
        """Lock the folder against other writers, and recover from a killed start.

        `launch` is an id that all restarts by one launcher share. With `writes=False` this does nothing.
        """
        if not self.writes:
            yield
            return
        was_there = self.remote is not None or self.path.exists()
        lock = RunLock(self.name, launch)
        try:
            with self.writing():
                self.path.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            self.lock = lock
            self._recover()
            yield
        finally:
            if not was_there and not self.exists:
                with suppress(OSError):
                    _retried(lambda: backup.remove(self.path))
            lock.release()
            self.lock = None
            if not was_there:
                with suppress(OSError):  # rmdir fails if the folder now holds a run
                    self.path.rmdir()

    def _recover(self) -> None:
        if self.remote:
            self.remote.recover()
            self.remote.pull()
            return
        with self.writing():
            if backup.recover(self.path):
                notice(
                    f"A start with --overwrite was killed before its run began: the previous run is restored in {self.name}."
                )
        for pattern in (".*.partial", "rollouts/.*.partial", "checkpoints/.*.removed"):
            for left in self.path.glob(pattern):
                backup.delete_or_warn(left)

    def recover_if_abandoned(self) -> None:
        """Restore the run that a killed start with --overwrite moved to the backup. Commands that only read call this."""
        if self.remote is None and backup.needs_recovery(self.path):
            # Skip the recovery if another process holds the lock or the folder is not writable.
            with suppress(UserError), RunFolder(self.path).locked():
                pass

    def note_launch(self, launch: str) -> None:
        if self.writes and launch:
            with self.writing():
                (self.path / "logs").mkdir(exist_ok=True)
                write_whole(self.path / "logs" / "launch", launch)

    def launched_by(self, launch: str) -> bool:
        """Return whether an earlier start with the same launch id created or resumed the run."""
        if not launch or not self.exists or backup.is_unstarted(self.path) or backup.needs_recovery(self.path):
            return False
        if self.remote:
            self.remote.fetch("logs/launch")
        noted = self.path / "logs" / "launch"
        return noted.is_file() and noted.read_text() == launch

    def pull(self) -> None:
        """Copy the run from shared storage to the working copy. Do nothing for a run on disk."""
        if self.remote:
            self.remote.pull()

    def push(self) -> None:
        """Copy the files changed since the last push to shared storage. Do nothing for a run on disk."""
        if self.remote:
            self._refuse_if_lost()
            self.remote.push()

    def push_or_warn(self, warn: Callable[[str], None]) -> None:
        """Push, but only warn on failure, so that a storage outage does not end the run."""
        try:
            self.push()
        except UserError as error:
            warn(str(error))

    @property
    def push_is_due(self) -> bool:
        return self.remote is not None and self.remote.due

    @contextmanager
    def opening(self, config: Config, *, resume: bool, overwrite: bool) -> Iterator[None]:
        """Prepare the folder for a run. The block sets up the run.

        If the block fails, the new files are removed and an overwritten run is restored.
        """
        if not self.writes:
            yield
            self.begun = True
            return
        self.refuse_if_taken(resume=resume, overwrite=overwrite)
        if self.exists and resume:
            self._refuse_another_config(config)
            yield
            self._write_config(config)
            with self.writing():
                backup.commit(self.path)  # delete files of a start that was killed before its run began
            self.begun = True
            self.push()
            return
        was_there = self.path.exists()
        try:
            with self.writing():
                self.path.mkdir(parents=True, exist_ok=True)
                self.remote.clear() if self.remote else backup.move_out(self.path)
            self._write_config(config)
            yield
            self._begin(config)
        except BaseException:
            with suppress(OSError, UserError):  # report the error of the failed start
                self.remote.clear() if self.remote else _retried(lambda: backup.restore(self.path))
                if not was_there:
                    self.path.rmdir()
            raise

    def _begin(self, config: Config) -> None:
        """Commit the new run and delete the overwritten one. A later kill no longer restores the overwritten run."""
        with self.writing():
            self.remote.replace(_text(config)) if self.remote else backup.commit(self.path)
        self.begun = True
        self.push()

    def _write_config(self, config: Config) -> None:
        with self.writing():
            self.rollouts.mkdir(parents=True, exist_ok=True)
            if isinstance(self.checkpoints, Path):
                self.checkpoints.mkdir(exist_ok=True)
            write_whole(self.path / "config.toml", _text(config) + "".join(self.history))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError in the block into a UserError. Raise UserError first if another process has taken the lock."""
        self._refuse_if_lost()
        try:
            yield
        except OSError as error:
            reason, remedy = refusal(error, self.path)
            then = "continue with --resume" if self.metrics.exists() else "set another --run-dir"
            joint = "and" if self.metrics.exists() else "or"
            raise UserError(f"The run folder {self.name} cannot be written ({reason}): {remedy} {joint} {then}.") from error

    def _refuse_if_lost(self) -> None:
        if self.lock and self.lock.lost:
            raise UserError(
                f"{self.name} was taken over by another run, because this run sent no heartbeat for too long: see the lock "
                "file, and continue only one of the two runs with --resume."
            )

    def _refuse_another_config(self, config: Config) -> None:
        resume.changes(self.name, resume.options_of(self.config()), resume.options_of(config))
        lines = (self.path / "config.toml").read_text().splitlines(keepends=True)
        self.history = [line for line in lines if line.startswith(resume.EARLIER_VALUE)]

    def note_changes(self, comments: list[str]) -> None:
        """Add comments for the next write of config.toml, without duplicates."""
        self.history += [each for each in comments if each not in self.history]

    def drop_rows_after(self, step: int, warn: Callable[[str], None], budgets: Sequence[dict[str, Any]] = ()) -> None:
        """Delete metrics, xi rows, budgets and rollouts after `step`, the checkpoint to resume from. Also drop invalid rows.

        The changes of the budget at `step` become those in `budgets`. An earlier resume from this checkpoint may have added others.
        """
        if not self.writes:
            return
        with self.writing():
            for file in (self.metrics, self.xi, self.budget):
                found = read_rows(file)
                kept = [row for row in found.rows if row["step"] <= step]
                if file == self.budget:
                    kept = [row for row in kept if row["step"] < step] + [row for row in budgets if row["step"] == step]
                if file.exists():
                    write_whole(file, "".join(json.dumps(row) + "\n" for row in kept))
                if found.unreadable:
                    warn(f"{file.name}: dropped {counted(found.unreadable, 'line')} that cannot be read.")
                if file == self.metrics and (missing := missing_steps(kept, step)):
                    shown = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
                    warn(f"{file.name} lacks {counted(len(missing), 'step')} ({shown}); the run continues nevertheless.")
            for file in self.rollouts.glob("step-*.parquet"):
                number = file.stem.removeprefix("step-")
                if number.isdecimal() and int(number) > step and not file.is_dir():
                    file.unlink()

    @property
    def last_step(self) -> float:
        """Last logged step; infinity if the final model exists, because every checkpoint was then saved."""
        return math.inf if self.model.exists() else max((row["step"] for row in self.read_metrics()), default=0)

    def append_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._append(self.metrics, {"step": step, **metrics})

    def append_xi(self, step: int, counts: list[int]) -> None:
        """Append the histogram of xi of one step to xi.jsonl; see `monitor/ratios.py`."""
        self._append(self.xi, {"step": step, "counts": counts})

    def append_budget(self, row: dict[str, Any]) -> None:
        """Append a change of the budget to budget.jsonl; see `auto_budget.py`."""
        self._append(self.budget, row)

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        if not self.writes:
            return
        with self.writing(), path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, float]]:
        return read_rows(self.metrics).rows


def _text(config: Config) -> str:
    return f"format = {FORMAT}\n{to_toml(config)}{config.defaults_comment}"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see either the old or the new content, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _retried(work: Callable[[], None]) -> None:
    """Run `work`. On OSError, retry for up to `LATE_WRITES_S` seconds: other ranks may still write to the folder."""
    ends = time.monotonic() + LATE_WRITES_S
    while True:
        try:
            return work()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)
