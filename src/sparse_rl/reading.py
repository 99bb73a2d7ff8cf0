"""Read a file that a user named, and only a file: a device may never end, a pipe may never begin."""

import errno
import os
import stat


def read_file(path: str, most: int | None = None) -> bytes:
    """The bytes of a regular file of at most `most` bytes; else an `OSError` or, where the name holds a NUL, a `ValueError`."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe", path)
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {most:,}", path)
    with open(path, "rb") as file:
        return file.read()
