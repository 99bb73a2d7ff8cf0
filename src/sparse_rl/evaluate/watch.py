"""Display the progress of an evaluation: a progress bar on a terminal, otherwise one line per chunk of problems."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from ..format import clock, counted
from ..rollout.stats import Progress as Sampled


class EvalProgress:
    def __init__(self, console: Console):
        self.console, self.total, self.done = console, 0, 0
        self.started = time.monotonic()
        columns = ("{task.description}", "{task.fields[speed]}", "{task.fields[left]}")
        texts = [TextColumn(column, markup=False) for column in columns]
        shown = (texts[0], BarColumn(), MofNCompleteColumn(), *texts[1:])
        self.bar = Progress(*shown, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("loading", total=None, speed="", left="")

    def __enter__(self) -> "EvalProgress":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def restart(self) -> None:
        """Restart the clock, so that the estimate of the time left excludes loading."""
        self.started = time.monotonic()

    def add_rollouts(self, rollouts: int) -> None:
        """Add rollouts that are still to sample."""
        self.total += rollouts
        self.bar.update(self.task, total=self.total)

    def set_status(self, what: str) -> None:
        self.bar.update(self.task, description=what)

    def sampled(self, progress: Sampled) -> None:
        """Update the progress bar; called between chunks of decode steps."""
        speed = f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
        self.bar.update(self.task, completed=self.done + progress.finished, speed=speed, left=self.left(progress.finished))

    def chunk(self, what: str, rollouts: int, tokens_per_s: float) -> None:
        """Count a chunk of problems as done, after it was sampled, graded and written."""
        self.done += rollouts
        self.bar.update(self.task, completed=self.done, left=self.left())
        if not self.console.is_terminal:
            line = f"{what}: {self.done:,} of {counted(self.total, 'rollout')}, {tokens_per_s:,.0f} tokens/s, {self.left()}"
            self.console.print(Text(line), soft_wrap=True)

    def left(self, more: int = 0) -> str:
        """Return the estimated time left, based on finished rollouts. Long rollouts finish last, so early values are low."""
        done = self.done + more
        if not done:
            return ""
        return f"{clock((time.monotonic() - self.started) / done * (self.total - done))} left"
