"""Refresh the report during training. If writing the report fails, the run logs one warning and continues."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import first_line
from . import page
from .document import ReportSource
from .pieces import Pieces

SHARE = 0.02
"""Maximum share of the run time spent on refreshing the report."""


class LiveReport:
    def __init__(self, run: Path, tokenizer: Any, warn: Callable[[str], None]):
        self.run, self.warn = run, warn
        self.source = ReportSource([run], _pieces(tokenizer))
        self.due = 0.0
        self.warned = False

    def refresh(self) -> None:
        """Write the report if it is due. The wait after a write is proportional to its duration, by `SHARE`."""
        if time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        started = time.monotonic()
        try:
            page.write(self.source, self.run / page.FILE)
        except Exception as error:
            if not self.warned:
                self.warn(
                    f"The report could not be written ({first_line(error)}). Write it later with sparse-rl report {self.run}."
                )
            self.warned = True
        ended = time.monotonic()
        self.due = ended + (ended - started) / SHARE


def _pieces(tokenizer: Any) -> Pieces | None:
    """Return the token texts of a fast tokenizer. Return None for a slow tokenizer; `pieces.find` then searches the disk."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return Pieces(fast) if fast is not None else None
