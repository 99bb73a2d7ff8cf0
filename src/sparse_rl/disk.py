"""Name what a disk refuses to write: full, over quota, not permitted, read-only. Each has its own remedy."""

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
"""A disk that cannot take this much more is full."""


def refusal(error: BaseException, folder: Path) -> tuple[str, str]:
    """(the reason, the remedy) of a failed write to `folder`. Libraries hide the reason: torch says "unexpected pos 704 vs 598"
    of a full disk. Then the disk is asked again, and where it takes a file, space is not what is missing."""
    number = next(filter(None, map(_errno, _chain(error))), None) or _probed(folder)
    if number is None:
        return first_line(error), "check the disk"
    return os.strerror(number), REMEDIES.get(number, "check the disk")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from and, for many ranks, theirs."""
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
    """What the disk says to a new file; None where it takes one."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(os.urandom(PROBE_BYTES))  # no posix_fallocate: not every system has it; no zeros: a disk may compress
            file.flush()
            os.fsync(file.fileno())  # some file systems look for room only now
    except OSError as error:
        return error.errno
    return None
