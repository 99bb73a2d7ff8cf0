"""Runs on shared storage: any address that fsspec knows, such as s3://bucket/runs/mine.

Checkpoints go straight there, each rank its part. All else is written to a working copy on this machine's disk and copied
when it has changed, for what object stores hold cannot be appended to.
"""

import functools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from ..errors import Absent, UserError, first_line

Place = Path | str
"""A folder on a disk, or the address of one."""
STAYS = ("checkpoints", "model")
"""What is not copied from storage to go on with a run."""
EVERY_S = 60.0
"""Between copies of what grows with every step."""


def place(name: Place) -> Place:
    return name if isinstance(name, str) and is_address(name) else Path(name)


def is_address(name: str) -> bool:
    return "://" in name


def within(place: Place, name: str) -> Place:
    return place / name if isinstance(place, Path) else f"{place.rstrip('/')}/{name}"


def opened(place: Place) -> tuple[Any, str]:
    """(the file system, the path in it)."""
    if isinstance(place, Path):
        return fsspec.filesystem("file"), os.path.abspath(place)
    try:
        return fsspec.core.url_to_fs(place)
    except ImportError as error:
        raise Absent(f"{place} needs a package that is not installed: {first_line(error)} (pip install).") from error
    except ValueError as error:
        raise UserError(
            f"{place} cannot be a run folder ({first_line(error)}): name a path or an address of fsspec."
        ) from error


def remove(place: Place) -> None:
    fs, path = opened(place)
    fs.invalidate_cache()
    if fs.exists(path):
        fs.rm(path, recursive=True)


class WorkingCopy:
    """Of one run, for one process: all of the run for the rank that writes it, the logs of its own for any other."""

    def __init__(self, address: str):
        self.address = address
        self.fs, self.root = opened(address)
        self._folder = tempfile.TemporaryDirectory(prefix="sparse-rl-")
        self.path = Path(self._folder.name) / self.root.rstrip("/").rsplit("/", 1)[-1]
        self.path.mkdir()
        self._copied: dict[str, tuple[int, int]] = {}
        self._due = 0.0
        self._pulled = False

    def pull(self) -> None:
        """What is there now, once."""
        if self._pulled:
            return
        self._pulled = True
        with self.answering("read"):
            self.fs.invalidate_cache()
            for file in self.fs.find(self.root) if self.fs.exists(self.root) else ():
                name = file.removeprefix(self.root).lstrip("/")
                if name.split("/")[0] in STAYS:
                    continue
                self._get(name)

    def fetch(self, name: str) -> None:
        """One file, if it is there."""
        with self.answering("read"):
            if self.fs.exists(f"{self.root}/{name}"):
                self._get(name)

    def _get(self, name: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(f"{self.root}/{name}", str(self.path / name))
        self._copied[name] = _stamp(self.path / name)

    def push(self) -> None:
        """What has changed; what is gone here, goes there."""
        here = {str(file.relative_to(self.path)): _stamp(file) for file in self.path.rglob("*") if file.is_file()}
        with self.answering("written"):
            for name in [name for name, stamp in here.items() if self._copied.get(name) != stamp]:
                target = f"{self.root}/{name}"
                if target.startswith("/"):  # object stores have no folders, and would make a bucket of a misspelt name
                    self.fs.makedirs(os.path.dirname(target), exist_ok=True)
                self.fs.put_file(str(self.path / name), target)
                self._copied[name] = here[name]
            for name in self._copied.keys() - here.keys():
                self.fs.rm_file(f"{self.root}/{name}")
                del self._copied[name]
        self._due = time.monotonic() + EVERY_S

    def push_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S  # also where it fails
            self.push()

    def read_text(self, name: str) -> str:
        try:
            return self.fs.cat_file(f"{self.root}/{name}").decode()
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._silent("read", error) from error

    def has(self, name: str) -> bool:
        with self.answering("read"):
            self.fs.invalidate_cache()
            return bool(self.fs.exists(f"{self.root}/{name}"))

    def empty(self) -> None:
        with self.answering("written"):
            remove(self.address)
        self._copied.clear()

    @contextmanager
    def answering(self, done: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # every file system has its own kinds
            raise self._silent(done, error) from error

    def _silent(self, done: str, error: Exception) -> UserError:
        return UserError(
            f"{self.address} cannot be {done} ({first_line(error)}): see to the address and what gives access to it, "
            "and continue with --resume where a run had begun."
        )


@functools.cache
def working_copy(address: str) -> WorkingCopy:
    return WorkingCopy(address)


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size
