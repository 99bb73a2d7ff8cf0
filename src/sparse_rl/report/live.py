"""The report of a run that is under way. A page is a convenience: what goes wrong with it is one warning, never the run's end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import first_line
from . import page
from .document import Source
from .pieces import Pieces

SHARE = 0.02
"""Of the run's time that refreshing may take."""


class LiveReport:
    def __init__(self, run: Path, tokenizer: Any, warn: Callable[[str], None]):
        self.run, self.warn = run, warn
        self.source = Source([run], _pieces(tokenizer))
        self.due = 0.0
        self.warned = False

    def refresh(self) -> None:
        """Now, unless the last time took so long that it is too early."""
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
    """A slow tokenizer has no backend: the texts are then found on disk, or not."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return Pieces(fast) if fast is not None else None
