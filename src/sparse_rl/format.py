"""Format counts, bytes and durations for display."""

import math

GIB = 2**30


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, e.g. 1 step or 1,200 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def agreeing(count: int, singular: str, plural: str) -> str:
    """Return the words that suit a count, e.g. `agreeing(1, "is", "are")`."""
    return singular if count == 1 else plural


def size(count: float) -> str:
    """Return a byte count with a unit, e.g. 4.2 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def gib(count: float) -> str:
    """Return a byte count in GiB without the unit: two decimals below 10, otherwise one."""
    digits = 2 if abs(count) < 10 * GIB else 1
    return f"{math.floor(count / GIB * 10**digits + 0.5) / 10**digits:.{digits}f}"


def clock(seconds: float) -> str:
    """Return a duration in hours, minutes and seconds, e.g. 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def duration(seconds: float) -> str:
    """Return a duration in a readable unit, e.g. 8 s, 12 min or 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
