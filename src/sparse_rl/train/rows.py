"""Read metrics.jsonl, xi.jsonl and budget.jsonl: JSON lines that each have a `step`."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .storage import read_plain

MOST_STEPS = 2**48


@dataclass(frozen=True)
class StepRows:
    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: int = 0
    """Number of invalid lines. A last line without a newline is not counted, because a kill may have truncated it."""


def read_rows(path: Path) -> StepRows:
    """Return all valid rows of a file, which may be damaged. Return no rows if the file does not exist."""
    if not path.exists():
        return StepRows()
    *lines, last = read_plain(path).split(b"\n")
    found = [_row(line) for line in lines if line.strip()]
    torn = _row(last)
    rows = [row for row in (*found, torn) if row is not None]
    return StepRows(rows, found.count(None))


def missing_steps(rows: list[dict[str, Any]], step: int) -> list[int]:
    """Return the steps up to `step` that have no row."""
    return sorted(set(range(step + 1)) - {row["step"] for row in rows})


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < MOST_STEPS:
        return None
    return row if all(_is_value(key, value) for key, value in row.items()) else None


def _is_value(key: str, value: Any) -> bool:
    if isinstance(value, list):
        return all(type(each) is int for each in value)
    if key == "reason":
        return isinstance(value, str)
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)
