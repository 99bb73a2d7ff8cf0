"""Alerts of a run: which metrics need attention, since which step, and what to try. `rules.py` has the rules.

Alerts are computed from the rows of metrics.jsonl and are not stored. A resumed run, or one inspected a year later, therefore
has the same alerts. This module depends only on rows of numbers, not on training code. Imports no torch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import KV, AlertsConfig
from .rules import RULES, History, Row, has_fallen, held_out_scores

FIXED = KV()
"""A cache with a fixed budget."""


@dataclass(frozen=True)
class Alert:
    step: int
    """Step at which the alert started."""
    name: str
    """Name of the alert. It equals the option that holds the limit, if there is one."""
    sentence: str
    """Description of the observation, with the value and the limit."""
    remedy: str
    """Suggested fix."""
    ended: int | None = None
    """Step at which the alert ended; None if it is active at the last row."""


def check(rows: Sequence[Row], settings: AlertsConfig, kv: KV = FIXED) -> list[Alert]:
    """Return all alerts of a run, in the order in which they started. The remedies suit the run's cache.

    `settings` are `Config.limits`. In a bare section, `auto` stands for the limit of a corrected run.
    """
    watch = AlertMonitor(settings, kv)
    for row in rows:
        watch.update(row)
    return watch.alerts


class AlertMonitor:
    """Checks a run row by row. A missing or non-finite value neither starts nor ends an alert."""

    def __init__(self, settings: AlertsConfig, kv: KV = FIXED):
        self.settings, self.kv = settings.resolved(corrected=True), kv
        self.alerts: list[Alert] = []
        """All alerts so far, in the order in which they started."""
        self._past = History(deque(maxlen=settings.steps))
        self._open: dict[str, int] = {}  # index in `alerts` of each active alert, by name
        self._against = dict.fromkeys(RULES, 0)  # consecutive steps that contradict the current state

    @property
    def active(self) -> list[Alert]:
        return [alert for alert in self.alerts if alert.ended is None]

    def update(self, row: Row) -> list[Alert]:
        """Add a row and return the alerts that start with it."""
        now = {key: value for key, value in row.items() if isinstance(value, int | float) and abs(value) < 1e300}
        if "step" not in now:
            return []
        self._past.add(now)
        began = len(self.alerts)
        for name, rule in RULES.items():
            limit = getattr(self.settings, name, 0.0)
            if limit == "none" or not now.keys() >= set(rule.needs) or (rule.evaluates and not held_out_scores(now)):
                continue
            sentence = rule.judge(now, self._past, limit)
            is_exceeded, is_open = sentence is not None, name in self._open
            self._against[name] = self._against[name] + 1 if is_exceeded != is_open else 0
            if self._against[name] < (1 if rule.evaluates else self.settings.steps):
                continue
            self._against[name] = 0
            if sentence is None:
                place = self._open.pop(name)
                self.alerts[place] = replace(self.alerts[place], ended=int(now["step"]))
            else:
                self._open[name] = len(self.alerts)
                remedy = rule.after_fall if rule.after_fall and has_fallen(now, self._past) else rule.remedy
                self.alerts.append(Alert(int(now["step"]), name, sentence, remedy.format(cache=self.kv.remedy)))
        return self.alerts[began:]
