"""Read a regular file that a user named. A device may never end and a pipe may never begin, so both are refused."""

import errno
import os
import stat


def read_file(path: str, most: int | None = None) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes; else raise OSError, or ValueError if the name holds a
    NUL."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe", path)
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {most:,}", path)
    with open(path, "rb") as file:
        return file.read()
