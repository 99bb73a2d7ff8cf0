"""Limit the size of `reward.log`, to which several worker processes append the output of rewards."""

import os
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 16 * 2**20
HEAD_BYTES = TAIL_BYTES = 2**20
"""Bytes kept at the start and at the end of a log that is trimmed."""


def trim(log: Path | None) -> None:
    """Remove the middle of a log larger than `MAX_BYTES`. Processes that have the log open continue to append at its new
    end."""
    with suppress(OSError):
        if log is None or log.stat().st_size <= MAX_BYTES:
            return
        with log.open("rb") as file:
            size = file.seek(-TAIL_BYTES, os.SEEK_END) + TAIL_BYTES
            tail = file.read()
        os.truncate(log, HEAD_BYTES)
        with log.open("ab") as file:
            file.write(b"\n[... %d MiB left out ...]\n%s" % ((size - HEAD_BYTES - TAIL_BYTES) // 2**20, tail))
