"""Store runs on shared storage, at any address that fsspec supports, such as s3://bucket/runs/mine.

Each rank writes its part of a checkpoint directly to storage. Objects in an object store cannot be appended to, so all other
files are written to a working copy on the local disk and copied to storage when they change.
"""

import errno
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from ..backup import LOCK
from ..errors import MissingResource, StorageUnavailable, UserError, first_line

Place = Path | str
"""The path of a folder on disk, or the fsspec address of a folder on shared storage."""
NOT_COPIED = ("checkpoints", "model")
"""Entries of a run folder that are not copied to the working copy."""
SUCCESSOR = ".replaced"
"""File that holds the new run's config.toml while `WorkingCopy.replace` deletes the old run."""
MOST_BYTES = 2**31
"""Maximum size in bytes of a file that is read into memory at once, such as metrics.jsonl."""
EVERY_S = 60.0
"""Seconds between two pushes of changed files to storage."""


def place(name: Place) -> Place:
    return name if isinstance(name, str) and is_address(name) else Path(name)


def is_address(name: str) -> bool:
    return "://" in name


def within(place: Place, name: str) -> Place:
    return place / name if isinstance(place, Path) else f"{place.rstrip('/')}/{name}"


def opened(place: Place) -> tuple[Any, str]:
    """Return (fsspec file system, path in that file system)."""
    if isinstance(place, Path):
        return fsspec.filesystem("file"), os.path.abspath(place)
    try:
        fs, path = fsspec.core.url_to_fs(place)
    except ImportError as error:
        raise MissingResource(
            f"{place} needs a package that is not installed ({first_line(error)}): install it with pip."
        ) from error
    except Exception as error:  # e.g. an invalid address or an unreachable host
        raise UserError(f"{place} cannot be a run folder ({first_line(error)}): pass a path or an fsspec address.") from error
    if not path.strip("/") or not (path.startswith("/") or "/" in path.strip("/")):
        raise UserError(
            f"{place} is the root of a storage, not a folder: pass a folder, such as {place.rstrip('/')}/runs/mine."
        )
    if set(path) & set("*?["):  # fsspec expands these characters as glob patterns, even when it deletes files
        raise UserError(f"{place} is not a valid run folder: its name must not contain *, ? or [.")
    return fs, path


@contextmanager
def storage_errors(place: Place, done: str) -> Iterator[None]:
    """Turn errors of shared storage in the block into StorageUnavailable. Errors of a local disk are raised unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # fsspec file systems raise different types
        if isinstance(place, Path):
            raise
        raise StorageUnavailable(
            f"{place} cannot be {done} ({first_line(error)}): check the storage and its credentials. If the run had "
            "started, continue with --resume."
        ) from error


def names_in(place: Place) -> set[str]:
    """Return the names in a folder; empty if the folder does not exist.

    This lists the folder instead of calling fsspec's `exists`, which may return False for unreachable storage.
    """
    fs, path = opened(place)
    with storage_errors(place, "read"):
        fs.invalidate_cache()
        try:
            found = fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except OSError as error:
            if not isinstance(place, Path):
                raise
            if error.errno == errno.ELOOP:
                return set()
            raise UserError(f"{place} cannot be read ({error.strerror}): check its permissions and the disk.") from error
    return {each.rstrip("/").rsplit("/", 1)[-1] for each in found if each.rstrip("/") != path.rstrip("/")}


def read_plain(path: Path) -> bytes:
    """Return the content of a local file. Raise UserError if it is not a regular file or exceeds `MOST_BYTES`."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path} is not a regular file: restore or remove it.")
    if info.st_size > MOST_BYTES:
        raise UserError(f"{path} has {info.st_size:,} bytes, more than a run writes: restore or remove it.")
    return path.read_bytes()


def remove(place: Place) -> None:
    """Delete a folder. On disk, a kill never leaves a partly deleted folder under its original name."""
    if isinstance(place, Path):
        if place.exists():
            hidden = place.with_name(f".{place.name}.removed")
            shutil.rmtree(hidden, ignore_errors=True)
            place.rename(hidden)
            shutil.rmtree(hidden)
        return
    fs, path = opened(place)
    if names_in(place):
        with storage_errors(place, "written"):
            fs.rm(path, recursive=True)


def move(place: Place, to: Place) -> None:
    """Move a folder to `to`. Delete `to` first if it exists."""
    fs, path = opened(place)
    remove(to)
    with storage_errors(place, "written"):
        fs.mv(path, opened(to)[1], recursive=True)


class WorkingCopy:
    """Local copy of a run on shared storage, used by one process.

    Rank 0 copies the whole run except `NOT_COPIED`. The other ranks copy only their own logs.
    """

    def __init__(self, address: str):
        self.address = address
        self.fs, self.root = opened(address)
        self.path = _own_folder(address) / self.root.rstrip("/").rsplit("/", 1)[-1]
        self.path.mkdir()
        self._copied: dict[str, tuple[int, int]] = {}
        self._due = 0.0
        self._pulled = False

    def pull(self) -> None:
        """Copy the run from storage, if it exists. Later calls do nothing."""
        if self._pulled:
            return
        self._pulled = True
        if not self.exists:
            return
        with storage_errors(self.address, "read"):
            for file in self.fs.find(self.root):
                name = file.removeprefix(self.root).lstrip("/")
                if name.split("/")[0] not in (*NOT_COPIED, LOCK):
                    self._get(name)

    def fetch(self, name: str) -> None:
        """Copy one file from storage, if it exists."""
        with storage_errors(self.address, "read"), suppress(FileNotFoundError):
            self._get(name)

    def _get(self, name: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(f"{self.root}/{name}", str(self.path / name))
        self._copied[name] = _stamp(self.path / name)

    def push(self) -> None:
        """Copy changed files to storage. Delete files from storage that were deleted from the working copy."""
        self._due = time.monotonic() + EVERY_S
        here: dict[str, tuple[int, int]] = {}
        for folder, _, files in os.walk(self.path):
            for file in (Path(folder) / name for name in files):
                with suppress(FileNotFoundError):  # a logger may delete a file at any time
                    here[str(file.relative_to(self.path))] = _stamp(file)
        with storage_errors(self.address, "written"):
            for name in [name for name, stamp in here.items() if self._copied.get(name) != stamp]:
                self._put(name)
                self._copied[name] = here[name]
            for name in self._copied.keys() - here.keys():
                with suppress(FileNotFoundError):
                    self.fs.rm_file(f"{self.root}/{name}")
                del self._copied[name]

    def _put(self, name: str) -> None:
        target = self._target(name)
        try:
            self.fs.put_file(str(self.path / name), target)
        except FileNotFoundError:
            if (self.path / name).exists():
                raise

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._due

    @property
    def exists(self) -> bool:
        return not names_in(self.address).isdisjoint(("config.toml", SUCCESSOR))

    def config(self) -> str:
        """Return the text of the run's config.toml, or of `SUCCESSOR` if a replacement was interrupted."""
        with storage_errors(self.address, "read"):
            for name in (SUCCESSOR, "config.toml"):
                with suppress(FileNotFoundError):
                    return self.fs.cat_file(f"{self.root}/{name}").decode()
        raise UserError(f"{self.address} is not a run folder (no config.toml): pass a run folder.")

    def replace(self, config: str) -> None:
        """Replace the run on storage with a new run that has this config.toml.

        Storage has no atomic rename. Once the file `SUCCESSOR` exists, the new run is the valid one. If a kill interrupts the
        replacement, `recover` completes it.
        """
        with storage_errors(self.address, "written"):
            self._write(SUCCESSOR, config)
            for name in names_in(self.address) - {LOCK, SUCCESSOR}:
                self.fs.rm(f"{self.root}/{name}", recursive=True)
            self._write("config.toml", config)
            self.fs.rm_file(f"{self.root}/{SUCCESSOR}")
        self._copied.clear()

    def recover(self) -> None:
        if SUCCESSOR in names_in(self.address):
            self.replace(self.config())

    def clear(self) -> None:
        """Delete all files of the working copy. The run on storage is not changed."""
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._copied.clear()
        self._pulled = True

    def _write(self, name: str, text: str) -> None:
        self.fs.pipe_file(self._target(name), text.encode())

    def _target(self, name: str) -> str:
        target = f"{self.root}/{name}"
        if target.startswith("/"):  # not for object stores: they have no folders, and makedirs may create a bucket
            self.fs.makedirs(os.path.dirname(target), exist_ok=True)
        return target


@functools.cache
def working_copy(address: str) -> WorkingCopy:
    return WorkingCopy(address)


def _own_folder(address: str) -> Path:
    """Return a new temporary folder, locked until this process ends. Delete folders left by killed processes."""
    prefix = f"sparse-rl-{hashlib.sha256(address.encode()).hexdigest()[:12]}-"
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), (old / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    made = tempfile.TemporaryDirectory(prefix=prefix)
    lock = (Path(made.name) / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append((made, lock))
    return Path(made.name)


_held: list[Any] = []
"""Temporary folders and their locks, which this process keeps until it ends."""


def _stamp(file: Path) -> tuple[int, int]:
    info = file.stat()
    return info.st_mtime_ns, info.st_size
