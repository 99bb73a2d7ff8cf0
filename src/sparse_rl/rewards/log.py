"""`reward.log`: the output of rewards. Several processes append to it, and it never grows far beyond its limit."""

import os
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 16 * 2**20
HEAD_BYTES = TAIL_BYTES = 2**20
"""Bytes kept at the beginning and at the end of a log that has grown too long."""


def trim(log: Path | None) -> None:
    """Cut the middle out of a log over `MAX_BYTES`. Processes that append continue at its new end."""
    with suppress(OSError):
        if log is None or log.stat().st_size <= MAX_BYTES:
            return
        with log.open("rb") as file:
            size = file.seek(-TAIL_BYTES, os.SEEK_END) + TAIL_BYTES
            tail = file.read()
        os.truncate(log, HEAD_BYTES)
        with log.open("ab") as file:
            file.write(b"\n[... %d MiB left out ...]\n%s" % ((size - HEAD_BYTES - TAIL_BYTES) // 2**20, tail))
