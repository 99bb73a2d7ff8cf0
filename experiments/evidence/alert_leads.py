"""H: which alerts fired in which runs, and how many steps before the reward of a collapsed run had fallen."""

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from collapse import FALL, ending, fall_step
from curves import WINDOW
from raw import Rows, read

from sparse_rl.config import AlertsConfig
from sparse_rl.monitor.alerts import check
from sparse_rl.monitor.rules import EARLY_STEPS, RULES

TASKS = {
    "short": ("pilot", "a-collapse", "a-corrections", "b-budget", "d-samples"),
    "long": ("l-long",),
    "G": ("g-graded", "g-length"),
}
"""Questions with short answers to GSM8K, with long ones, and with another task."""
NAIVE, DENSE, CORRECTED = KINDS = ("naive", "dense", "corrected")
GROUPS = tuple((kind, task) for kind in KINDS for task in TASKS)
XI_LIMITS = (0.6, 0.7, 0.8, 0.86, 0.9)
"""Limits of `alerts.xi_p05` that are compared."""


@dataclass(frozen=True)
class Run:
    task: str
    name: str
    kind: str
    rows: Rows
    collapsed: bool


@functools.cache
def every_run() -> tuple[Run, ...]:
    """Return each finished run once. Several questions share runs."""
    return tuple(_every_run())


def _every_run() -> Iterator[Run]:
    seen = set()
    for task, questions in TASKS.items():
        for question in questions:
            for arm, runs in read(question).items():
                for seed, rows in runs.items():
                    if id(rows) not in seen:
                        seen.add(id(rows))
                        yield Run(task, f"{arm}-{seed}", kind(arm), rows, ending(rows).collapsed)


def kind(arm: str) -> str:
    """Return the kind of an arm. Every sparse arm but `naive` counts as corrected, `on_policy_sparse` included."""
    if arm.startswith("naive"):
        return NAIVE
    return DENSE if arm.startswith(("dense", "full")) and arm != "dense-4bit" else CORRECTED


def default_limits(arm: str) -> AlertsConfig:
    """Return the limits of the alerts in runs of an arm."""
    return AlertsConfig().resolved(corrected=kind(arm) == CORRECTED)


def first_alerts(settings: AlertsConfig) -> list[tuple[Run, dict[str, int]]]:
    """Return each run with the first step of each alert that fired."""
    found = []
    for run in every_run():
        steps: dict[str, int] = {}
        for alert in check(run.rows, settings.resolved(corrected=run.kind == CORRECTED)):
            steps.setdefault(alert.name, alert.step)
        found.append((run, steps))
    return found


def alert_heads(first: str) -> list[str]:
    runs = every_run()
    groups = (f"{kind}, {task} ({sum((run.kind, run.task) == (kind, task) for run in runs)})" for kind, task in GROUPS)
    return [first, *groups, f"collapsed ({sum(run.collapsed for run in runs)})", "lead, steps"]


def alert_rows() -> list[list[str]]:
    """Return a row for each alert at its default limit."""
    found = first_alerts(AlertsConfig())
    return [[f"`{name}`", *alert_cells([(run, steps.get(name)) for run, steps in found])] for name in RULES]


def xi_limit_rows() -> list[list[str]]:
    """Return a row for each limit of `XI_LIMITS`."""
    found = {limit: first_alerts(AlertsConfig(xi_p05=limit)) for limit in XI_LIMITS}
    return [[f"{limit:g}", *alert_cells([(run, steps.get("xi_p05")) for run, steps in runs])] for limit, runs in found.items()]


def alert_cells(fired: list[tuple[Run, int | None]]) -> list[str]:
    """Return the number of runs of each group in which an alert fired, and its lead in each collapsed run.

    The lead is the number of steps from the alert to the fall of the reward; "-" if the alert did not fire.
    """
    cells = [str(sum((run.kind, run.task) == group and step is not None for run, step in fired)) for group in GROUPS]
    steps = [(step, fall_step(run.rows)) for run, step in fired if run.collapsed]
    ahead = [f"{fell - step:+d}" if step and fell else "-" for step, fell in steps]
    warned = sum(step is not None for step, _ in steps)
    return [*cells, str(warned), ", ".join(ahead) if warned else ""]


NAIVE_HEADS = (
    "run",
    "answers",
    "collapsed",
    f"reward {FALL:.0%} below its best at step".replace("%", " %"),
    *(f"ξ p05, {when} five steps" for when in ("first", "last")),
    *("`grad_norm` fired at step", "highest gradient norm after step 10 / median up to it"),
)


def naive_rows() -> list[list[str]]:
    """Return a row for each naive run on GSM8K."""
    rows = []
    for run, alerts in first_alerts(AlertsConfig()):
        if run.kind != NAIVE or run.task == "G":
            continue
        values = [row["sparse/xi_p05"] for row in run.rows if "sparse/xi_p05" in row]
        norms = [row["policy/grad_norm"] for row in run.rows if "policy/grad_norm" in row]
        later = norms[EARLY_STEPS:]
        cells = [run.name, run.task, "yes" if run.collapsed else "no", str(fall_step(run.rows) or "never")]
        cells += [f"{statistics.mean(part):.2f}" for part in (values[:WINDOW], values[-WINDOW:])]
        cells.append(str(alerts.get("grad_norm", "never")))
        rows.append([*cells, f"{max(later) / statistics.median(norms[:EARLY_STEPS]):.3g}" if later else "run ended"])
    return rows
