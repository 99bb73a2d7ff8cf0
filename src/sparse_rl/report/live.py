"""Write the report of a run in progress. A failure to write it is one warning and never ends the run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import first_line
from . import page
from .document import ReportSource
from .pieces import Pieces

SHARE = 0.02
"""Share of the run's time that refreshing may take."""


class LiveReport:
    def __init__(self, run: Path, tokenizer: Any, warn: Callable[[str], None]):
        self.run, self.warn = run, warn
        self.source = ReportSource([run], _pieces(tokenizer))
        self.due = 0.0
        self.warned = False

    def refresh(self) -> None:
        """Write the page, unless the last write took so long that it is too early."""
        if time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        started = time.monotonic()
        try:
            page.write(self.source, self.run / page.FILE)
        except Exception as error:
            if not self.warned:
                self.warn(f"The report could not be written ({first_line(error)}); try sparse-rl report {self.run}.")
            self.warned = True
        ended = time.monotonic()
        self.due = ended + (ended - started) / SHARE


def _pieces(tokenizer: Any) -> Pieces | None:
    """Return the pieces of a fast tokenizer; None for a slow one, whose texts are then looked up on disk."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return Pieces(fast) if fast is not None else None
