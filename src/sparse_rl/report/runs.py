"""Read run folders, also incomplete or damaged ones and those of other versions. `Run.notes` lists unreadable parts."""

import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeGuard

from ..config import KV, PRESETS, Config, CorrectionSpec, flat, migrated_tables
from ..errors import UserError, first_line
from ..format import counted
from ..monitor.ratios import BINS
from ..text import printable
from ..train.rows import MOST_STEPS
from ..train.storage import read_plain

PER_RUN = ("seed", "run_dir", "compare")
"""Options that may differ between the runs of one group, which repeat an experiment with different seeds."""


@dataclass
class Run:
    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    """Every option by its dotted key, such as `kv.budget`; empty if config.toml cannot be read."""
    settings: Config | None = None
    """The validated configuration; None if this version cannot parse it."""
    rows: list[dict[str, float]] = field(default_factory=list)
    xi: list[tuple[int, list[int]]] = field(default_factory=list)
    """(step, number of tokens in each bin of log10 xi), from xi.jsonl."""
    budgets: list[dict[str, Any]] = field(default_factory=list)
    """Step, budgets before and after, and reason of each change by `kv.budget = auto`, from budget.jsonl."""
    rollout_files: dict[int, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences about missing or unreadable parts."""

    @property
    def method(self) -> str:
        return str(self.config.get("method", "?"))

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def steps(self) -> list[dict[str, float]]:
        """Rows of training steps. The row of step 0 is left out: it holds only an evaluation."""
        return [row for row in self.rows if row["step"] > 0]

    @property
    def kv(self) -> KV:
        """Cache of the run; the default one if this version cannot parse the configuration."""
        return KV() if self.settings is None else self.settings.kv

    @property
    def target_rejected(self) -> float | None:
        """Share of rejected rollouts that `kv.budget = auto` allows; None if the budget is fixed."""
        return self.settings.kv.target_rejected if self.settings is not None and self.settings.sets_budget else None

    @property
    def correction(self) -> CorrectionSpec:
        """Correction of the run; the paper's if this version cannot parse the configuration."""
        return PRESETS["paper"] if self.settings is None else self.settings.correction_spec

    @property
    def veto(self) -> float:
        """Threshold `correction.veto`: a token with xi below it rejects its rollout. 0 disables the veto."""
        if self.settings is not None:
            return self.correction.veto
        preset = self.config.get("correction.preset", "paper" if self.method in ("sparse_rl", "?") else "none")
        usual = PRESETS.get(str(preset), CorrectionSpec()).veto
        veto = self.config.get("correction.veto", usual)
        return float(veto) if _is_number(veto) and 0 <= veto < 1 else usual


# Find run folders


def find(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return (run folders, a note about each path without a run). A folder that contains runs is replaced by those runs."""
    runs: list[Path] = []
    notes: list[str] = []
    for path in paths:
        found, what = _runs_in(path)
        if not found:
            notes.append(f"{printable(str(path))} {what}: pass a run folder, or a folder that contains run folders.")
        runs += [each for each in found if each not in runs]
    if not runs:
        raise UserError(" ".join(notes))
    return runs, notes


def _runs_in(path: Path) -> tuple[list[Path], str]:
    """Return (the run folders at or directly in `path`, the reason if there are none)."""
    try:
        if is_run(path):
            return [path], ""
        if not path.is_dir():
            return [], "is not a folder" if path.exists() else "does not exist"
        inside = sorted(each for each in path.iterdir() if each.is_dir() and is_run(each))
    except OSError as error:
        return [], f"cannot be read ({error.strerror})"
    return inside, "is not a run folder (no config.toml, no metrics.jsonl)"


def is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("config.toml", "metrics.jsonl")) or any(
        path.glob("rollouts/step-*.parquet")
    )


def names(paths: Sequence[Path]) -> list[str]:
    """Return a distinct name for each folder: its path relative to the common parent of all folders."""
    whole = [Path(os.path.abspath(path)) for path in paths]
    if len(whole) == 1:
        return [printable(f"{whole[0].parent.name}/{whole[0].name}".strip("/"), 80)]
    common = Path(os.path.commonpath(whole))
    return [printable(str(path.relative_to(common)), 80) if path != common else printable(path.name, 80) for path in whole]


# Read run folders


def read(path: Path, name: str) -> Run:
    run = Run(path, name)
    _read_config(run)
    _read_metrics(run)
    _read_xi(run)
    _read_budgets(run)
    for file in (path / "rollouts").glob("step-*.parquet"):
        number = file.stem.removeprefix("step-")
        if number.isdigit() and file.is_file():  # reading a named pipe would block forever
            run.rollout_files[int(number)] = file
    run.rollout_files = dict(sorted(run.rollout_files.items()))
    if not run.rollout_files:
        run.notes.append(
            "The run has no stored rollouts (rollouts/): no step has finished yet, or log.rollouts_per_step is 0."
        )
    return run


def _read_config(run: Run) -> None:
    file = run.path / "config.toml"
    try:
        stored = tomllib.loads(read_plain(file).decode("utf-8"))
    except FileNotFoundError:
        run.notes.append("config.toml is missing, so the configuration is unknown.")
        return
    except (OSError, ValueError, RecursionError) as error:
        run.notes.append(f"config.toml cannot be read ({printable(first_line(error))}).")
        return
    run.config = flat({key: value for key, value in stored.items() if key != "format"})
    try:
        run.settings = Config(**migrated_tables(stored))
    except (UserError, TypeError) as error:
        run.notes.append(
            "config.toml is not valid for this version of sparse-rl (another version wrote it, or it was edited): "
            f"{printable(first_line(error))}."
        )


def _read_metrics(run: Run) -> None:
    by_step: dict[int, dict[str, float]] = {}
    bad: list[int] = []
    cut = False
    for number, value, last in _lines(run, "metrics.jsonl"):
        step = value.get("step") if isinstance(value, dict) else None
        if not _is_count(step):
            bad.append(number)
            cut = last
            continue
        numbers = {key: float(each) for key, each in value.items() if _is_number(each)}
        by_step[step] = by_step.get(step, {}) | numbers | {"step": step}
    run.rows = [by_step[step] for step in sorted(by_step)]
    if cut:
        bad.pop()
        run.notes.append("The last line of metrics.jsonl is incomplete: the run is still writing it, or was killed.")
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        run.notes.append(f"metrics.jsonl: skipped {counted(len(bad), 'line')} that cannot be read (line {shown}).")
    if not run.rows:
        run.notes.append("metrics.jsonl has no metrics yet: nothing can be plotted.")


def _read_xi(run: Run) -> None:
    def is_histogram(row: dict[str, Any]) -> bool:
        counts = row.get("counts")
        return _is_count(row.get("step")) and isinstance(counts, list) and len(counts) == BINS and all(map(_is_number, counts))

    rows = _valid_rows(run, "xi.jsonl", is_histogram)
    run.xi = sorted({row["step"]: [int(count) for count in row["counts"]] for row in rows}.items())
    if not (run.path / "xi.jsonl").exists():
        run.notes.append("xi.jsonl is missing, so only the percentiles of ξ in metrics.jsonl are shown.")


def _read_budgets(run: Run) -> None:
    counts = ("step", "before", "after")

    def is_change(row: dict[str, Any]) -> bool:
        return all(_is_count(row.get(key)) for key in counts) and isinstance(row.get("reason"), str)

    run.budgets = [{key: row[key] for key in (*counts, "reason")} for row in _valid_rows(run, "budget.jsonl", is_change)]


def _valid_rows(run: Run, name: str, is_valid: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return the valid rows of a file. Note the number of other lines, except an unterminated last line."""
    rows, bad = [], 0
    for _, value, is_unterminated in _lines(run, name):
        if isinstance(value, dict) and is_valid(value):
            rows.append(value)
        else:
            bad += not is_unterminated
    if bad:
        run.notes.append(f"{name}: skipped {counted(bad, 'line')} that cannot be read.")
    return rows


def _lines(run: Run, name: str) -> Iterator[tuple[int, Any, bool]]:
    """Yield (line number, parsed JSON, is_unterminated) for each non-empty line of the file `name`.

    The value is None if the line is not valid JSON. `is_unterminated` is true for a last line without a newline.
    """
    try:
        text = read_plain(run.path / name).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except (OSError, UserError) as error:
        run.notes.append(f"{name} cannot be read ({printable(first_line(error))}).")
        return
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            yield number, value, number == len(lines)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < MOST_STEPS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)


# Group runs


def grouped(runs: Sequence[Run]) -> list[tuple[str, list[int]]]:
    """Return (name, indices in `runs`) for each group of runs that differ only in the seed.

    A run without a configuration forms a separate group. A second run with the same seed starts another group.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    drawn: Counter[tuple[str, str]] = Counter()
    for place, run in enumerate(runs):
        same = {key: value for key, value in run.config.items() if key not in PER_RUN}
        key = json.dumps(same, sort_keys=True, default=str) if same else f"run {place}"
        groups.setdefault((key, drawn[key, str(run.seed)]), []).append(place)
        drawn[key, str(run.seed)] += 1
    named: list[tuple[str, list[int]]] = []
    for places in groups.values():
        first = runs[places[0]]
        name = first.name if len(places) == 1 else f"{_common(runs, places) or first.method}, {len(places)} seeds"
        named.append((name, places))
    return named


def _common(runs: Sequence[Run], places: Sequence[int]) -> str:
    """Return the common prefix of the run names, without trailing digits, separators or the word `seed`."""
    letters = zip(*(runs[place].name for place in places), strict=False)
    start = "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, letters))
    return start.rstrip("0123456789-_/. ").removesuffix("seed").rstrip("-_/. ")
