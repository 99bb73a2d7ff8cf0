"""Read a regular file named by the user.

A device or a pipe raises an error, because reading it may never end.
"""

import errno
import os
import stat


def read_file(path: str, most: int | None = None) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raise OSError if the file is larger or not a regular file, and ValueError if the path contains a NUL character.
    """
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe", path)
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {most:,}", path)
    with open(path, "rb") as file:
        return file.read()
