"""Explain why a write to disk failed (full, over quota, not permitted, read-only), and how to fix it."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import first_line

REMEDIES = {
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "get write permission",
    errno.EPERM: "get write permission",
    errno.EROFS: "mount the disk for writing",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EIO: "check the disk",
}
PROBE_BYTES = 2**20
"""Size of the test write in bytes. If the test write fails, the disk is considered full."""


def refusal(error: BaseException, folder: Path) -> tuple[str, str]:
    """Return (reason, remedy) of a failed write to `folder`.

    Some libraries hide the reason: on a full disk, torch reports "unexpected pos 704 vs 598". If the error has no errno, a
    test file is written to find the reason.
    """
    number = next(filter(None, map(_errno, _chain(error))), None) or _probed(folder)
    if number is None:
        return first_line(error), "check the disk"
    return os.strerror(number), REMEDIES.get(number, "check the disk")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, the exceptions in its cause chain and, for a multi-rank error, the errors of the ranks."""
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
    # message formats of safetensors and pyarrow
    found = re.search(r"\bos error (\d+)|\bOs \{ code: (\d+)|\[[Ee]rrno (\d+)\]", str(error))
    return int(next(filter(None, found.groups()))) if found else None


def _probed(folder: Path) -> int | None:
    """Write a test file to the folder. Return the errno of the failure, or None if the write succeeds."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            # Random bytes are written because posix_fallocate is not portable and a file system may compress zeros.
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # some file systems allocate space only at fsync
    except OSError as error:
        return error.errno
    return None
