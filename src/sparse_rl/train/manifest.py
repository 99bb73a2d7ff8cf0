"""The manifest of a checkpoint: its step, and the size and checksum of each file.

Files are hashed while they are written and verified before they are loaded.
"""

import errno
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePath
from threading import Thread
from typing import Any

from ..errors import UserError
from .storage import Place, opened, storage_errors, within

FILE = "manifest.json"
MOST_BYTES = 2**28
"""Maximum size in bytes of a file that is read into memory at once. The index of 100,000 tensors takes 50 MB."""
LARGE_BYTES = 2**20
"""Writes of at least this many bytes are hashed in a separate thread during the write."""
READERS = 4
"""Number of files verified in parallel."""
Entry = dict[str, Any]
"""Entry of one file: its size under `bytes` and its hex checksum under `blake2b`."""


class Damaged(UserError):
    """Raised for a checkpoint whose files are missing, invalid or changed. Earlier checkpoints may be undamaged."""

    def __init__(self, checkpoint: Place, why: str):
        super().__init__(f"{checkpoint} is damaged: {why}.")
        self.args = (checkpoint, why)  # pickling to another rank rebuilds the error from args
        self.checkpoint, self.why = checkpoint, why

    def __str__(self) -> str:
        return f"{self.checkpoint} is damaged: {self.why}."


def new_hash() -> Any:
    return hashlib.blake2b(digest_size=32)


def entry_of(content: bytes) -> Entry:
    digest = new_hash()
    digest.update(content)
    return {"bytes": len(content), "blake2b": digest.hexdigest()}


# Writing


class HashingFileSystem:
    """File system for torch.distributed.checkpoint that records the manifest entry of each file it writes."""

    def __init__(self, fs: Any):
        self.fs = fs
        self.written: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self.fs.create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield hashing
        self.written[PurePath(path).name] = {"bytes": hashing.size, "blake2b": hashing.digest.hexdigest()}

    def rename(self, path: Any, new_path: Any) -> None:
        self.fs.rename(path, new_path)
        self.written[PurePath(new_path).name] = self.written.pop(PurePath(path).name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fs, name)


class _HashingStream:
    def __init__(self, stream: Any):
        self.stream, self.digest, self.size = stream, new_hash(), 0

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        if content.nbytes < LARGE_BYTES:
            self.digest.update(content)
            self.stream.write(content)
        else:
            hashing = Thread(target=self.digest.update, args=(content,))
            hashing.start()
            try:
                self.stream.write(content)
            finally:
                hashing.join()  # the caller may reuse the memory after `write` returns
        self.size += content.nbytes
        return content.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# Reading


def read_small(checkpoint: Place, name: str, most: int = MOST_BYTES) -> bytes:
    """Return the content of one file of a checkpoint. Raise Damaged if it is missing or larger than `most` bytes."""
    fs, path = opened(checkpoint)
    with _reading(checkpoint, name):
        if _size(fs, f"{path}/{name}", checkpoint, name) > most:
            raise Damaged(checkpoint, f"{name} is larger than {most:,} bytes")
        return fs.cat_file(f"{path}/{name}")


def read_manifest(checkpoint: Place, step: int) -> dict[str, Entry]:
    """Return the manifest entries by file name. Raise Damaged if the manifest is invalid or belongs to another step."""
    try:
        stored = json.loads(read_small(checkpoint, FILE))
        files = {
            str(name): {"bytes": int(each["bytes"]), "blake2b": str(each["blake2b"])} for name, each in stored["files"].items()
        }
        if stored["step"] != step or any("/" in name for name in files):
            raise Damaged(checkpoint, f"{FILE} belongs to step {stored['step']!r:.40}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise Damaged(checkpoint, f"{FILE} cannot be read ({type(error).__name__})") from error
    return files


def verify(checkpoint: Place, files: dict[str, Entry]) -> None:
    """Raise Damaged if the size or checksum of a file differs from its entry in `files`."""
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda name: _verify(checkpoint, name, files[name]), files))


def _verify(checkpoint: Place, name: str, entry: Entry) -> None:
    fs, path = opened(checkpoint)
    with _reading(checkpoint, name):
        size = _size(fs, f"{path}/{name}", checkpoint, name)
        if size != entry["bytes"]:
            raise Damaged(checkpoint, f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
        with fs.open(f"{path}/{name}", "rb") as file:
            digest = hashlib.file_digest(file, new_hash)
    if digest.hexdigest() != entry["blake2b"]:
        raise Damaged(checkpoint, f"{name} is damaged (checksum mismatch)")


def _size(fs: Any, path: str, checkpoint: Place, name: str) -> int:
    fs.invalidate_cache()
    info = fs.info(path)
    if info["type"] != "file":
        raise Damaged(checkpoint, f"{name} is not a file")
    return info["size"]


@contextmanager
def _reading(checkpoint: Place, name: str) -> Iterator[None]:
    """Turn read errors in the block into Damaged (missing file) or UserError (unreadable file, which may be undamaged)."""
    try:
        with storage_errors(checkpoint, "read"):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                raise Damaged(checkpoint, f"{name} is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(checkpoint, f"{name} is a link to itself") from error
        raise UserError(
            f"{within(checkpoint, name)} cannot be read ({error.strerror or error}): check its permissions and the disk, "
            f"or remove {checkpoint} to use the previous checkpoint."
        ) from error
