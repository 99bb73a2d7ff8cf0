"""Memory of this machine that a process may use."""

import os
from contextlib import suppress
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, of cgroups version 2 and 1."""


def machine_bytes() -> int | None:
    """Return the memory of this machine in bytes, or of its container if that has less. None if it is unknown."""
    known = []
    with suppress(AttributeError, ValueError, OSError):  # not on every system
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            known.append(int(file.read_text()))
    return min((count for count in known if count > 0), default=None)
