"""Display the progress of a run: a live table on a terminal, plain lines otherwise."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..config import Config
from ..format import clock
from ..monitor.alerts import Alert, AlertMonitor
from ..monitor.rules import Row
from ..rollout.console import printable
from ..rollout.stats import Progress
from ..scores import are_shares, score_keys, score_text

SHOWN_STEPS = 12

COLUMNS: list[tuple[str, str, Callable[[float], str]]] = [
    ("reward", "reward/mean", "{:.3f}".format),
    ("not held", "kv/token_savings", "{:.0%}".format),
    ("rejected", "sparse/rejection_rate", "{:.0%}".format),
    ("mismatch", "sparse/mismatch_k3", "{:.1e}".format),
    ("xi p05", "sparse/xi_p05", "{:.2f}".format),
    ("entropy", "policy/entropy", "{:.3f}".format),
    ("tokens", "response/mean_tokens", "{:.0f}".format),
    ("tok/s", "perf/rollout_tokens_per_s", "{:,.0f}".format),
    ("s/step", "perf/step_s", "{:.1f}".format),
]
"""Heading, metric and format of each column."""


def summary(alerts: Sequence[Alert]) -> list[str]:
    """Return one line per alert name: the steps during which the alert was active, and its last sentence."""
    lines = ["Alerts of the run:"] if alerts else []
    for name in dict.fromkeys(alert.name for alert in alerts):
        matching = [alert for alert in alerts if alert.name == name]
        spans = [f"{each.step} to {each.ended - 1}" if each.ended else f"{each.step} on" for each in matching]
        lines.append(f"  {name}, step {', '.join(spans)}: {matching[-1].sentence}.")
    return lines


class RunTerminal:
    def __init__(self, config: Config, console: Console):
        self.config, self.console = config, console
        self.rows: deque[list[str]] = deque(maxlen=SHOWN_STEPS)
        self.now = ""
        self.started, self.first_step = 0.0, 0
        """Time at which this process began its first step, and the steps done before. Setup is not part of the time per step."""
        self.done = 0
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.drawn_at = 0.0
        self.alert_monitor = AlertMonitor(config.limits, config.kv)
        self.shares = True
        """True if all held-out scores so far are shares of correct answers, not mean rewards."""

    def __enter__(self) -> "RunTerminal":
        if self.live:
            self.live.start()
            self._set_status(f"loading {self.config.model.path}")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.now = ""
            self.live.transient = False
            self._draw(force=True)
            self.live.stop()
        for line in summary(self.alert_monitor.alerts):
            self.note(line)

    def resume_at(self, step: int) -> None:
        self.first_step = self.done = step

    def replay_rows(self, rows: Sequence[Row]) -> None:
        """Process the earlier metrics of a resumed run, and print the alerts that are still active."""
        self.shares = are_shares(rows)
        for row in rows:
            self.alert_monitor.update(row)
        for alert in self.alert_monitor.active:
            self._alert(alert)

    # Events

    @contextmanager
    def sampling(self, step: int) -> Iterator[Callable[[Progress], None]]:
        self.started = self.started or time.monotonic()
        yield lambda progress: self._set_status(
            f"step {step}: sampling {progress.finished}/{progress.total} rollouts, "
            f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
        )

    @contextmanager
    def learning(self, step: int) -> Iterator[None]:
        self._set_status(f"step {step}: learning")
        yield

    @contextmanager
    def evaluating(self, name: str, cache: str) -> Iterator[Callable[[Progress], None]]:
        yield lambda progress: self._set_status(
            f"evaluating {name} ({cache} cache): {progress.finished}/{progress.total}, "
            f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.done = step
        self.shares = self.shares and are_shares([metrics])
        for key in score_keys(metrics):
            text = score_text(metrics[key], metrics[f"{key}_low"], metrics[f"{key}_high"], share=self.shares)
            self.note(f"step {step}: {key}{'' if self.shares else ' (mean reward)'} {text}")
        if "reward/mean" not in metrics:
            return
        row = [form(metrics[key]) if key in metrics else "" for _, key, form in COLUMNS]
        self.rows.append([f"{step}/{self.config.steps}", *row])
        if self.live:
            self._draw(force=True)
        else:
            named = "  ".join(f"{name} {value}" for (name, _, _), value in zip(COLUMNS, row, strict=True))
            self.console.print(
                f"step {step}/{self.config.steps}  {named}  left {self._time_left()}", highlight=False, soft_wrap=True
            )
        for alert in self.alert_monitor.update({**metrics, "step": step}):
            self._alert(alert)

    def note(self, text: str) -> None:
        self._print(text)

    def table(self, table: Table) -> None:
        self.console.print(table)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    def _alert(self, alert: Alert) -> None:
        self._print(f"alert, step {alert.step}: {alert.sentence}. Try: {alert.remedy}.", "bold yellow")

    # Display

    def _print(self, text: str, style: str = "") -> None:
        """Print above the live table, if there is one. Markup and terminal escape sequences in `text` have no effect."""
        self.console.print(Text(printable(text), style=style), soft_wrap=True)

    def _set_status(self, text: str) -> None:
        self.now = text
        self._draw()

    def _draw(self, force: bool = False) -> None:
        if self.live and (force or time.monotonic() - self.drawn_at > 0.2):
            self.drawn_at = time.monotonic()
            self.live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        title = Text(printable(f"{self.config.method} in {self.config.run_dir}"))
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("step", *(name for name, _, _ in COLUMNS)):
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(*row)
        line = "  ".join(part for part in (self.now, f"left {self._time_left()}" if self.rows else "") if part)
        held = ", ".join(f"{alert.name} since step {alert.step}" for alert in self.alert_monitor.active)
        return Group(
            table, *([Text(f"alerts: {held}", style="bold yellow")] if held else []), Text(printable(line), style="dim")
        )

    def _time_left(self) -> str:
        done = self.done - self.first_step
        if done < 1:
            return "?"
        return clock((time.monotonic() - self.started) / done * (self.config.steps - self.done))
