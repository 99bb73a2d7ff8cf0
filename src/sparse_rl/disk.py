"""Explain a failed write to a disk: full, over quota, not permitted or read-only. Each has its own remedy."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import first_line

REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "get permission to write there",
    errno.EPERM: "get permission to write there",
    errno.EROFS: "mount it for writing",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EIO: "check the disk",
}
PROBE_BYTES = 2**20
"""Bytes of the test write; a disk that cannot take them is full."""


def refusal(error: BaseException, folder: Path) -> tuple[str, str]:
    """Return (reason, remedy) of a failed write to `folder`.

    Libraries hide the reason: for a full disk torch says "unexpected pos 704 vs 598". Then a test file is written; if that
    succeeds, the disk is not full.
    """
    number = next(filter(None, map(_errno, _chain(error))), None) or _probed(folder)
    if number is None:
        return first_line(error), "check the disk"
    return os.strerror(number), REMEDIES.get(number, "check the disk")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and, for several ranks, their errors."""
    seen: list[BaseException] = []
    left = [error]
    while left:
        each = left.pop(0)
        if each not in seen:
            seen.append(each)
            yield each
            failures = getattr(each, "failures", None)
            left += [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
            left += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = re.search(r"\bos error (\d+)|\bOs \{ code: (\d+)|\[[Ee]rrno (\d+)\]", str(error))  # safetensors; pyarrow
    return int(next(filter(None, found.groups()))) if found else None


def _probed(folder: Path) -> int | None:
    """Return the errno of writing a test file; None if that succeeds."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            # Not every system has posix_fallocate, and a disk may compress zeros.
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # some file systems allocate only now
    except OSError as error:
        return error.errno
    return None
