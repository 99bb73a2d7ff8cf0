"""Held-out scores of a run, and which of them clearly rose or fell."""

from dataclasses import dataclass

from ..scores import are_shares, score_keys, score_set, score_text
from ..text import printable
from .runs import Run


@dataclass(frozen=True)
class HeldOutScore:
    """The held-out score of one step, with its 95 % interval."""

    step: int
    mean: float
    low: float | None
    high: float | None
    share: bool
    """True if the score is a share of correct answers, False if it is a mean reward."""

    def __str__(self) -> str:
        return score_text(self.mean, self.low, self.high, share=self.share)


def scores(run: Run) -> dict[str, list[HeldOutScore]]:
    """Return the held-out scores of all evaluated steps, by key (`eval/<benchmark>/pass@1` or `…/pass@1_sparse`)."""
    found: dict[str, list[HeldOutScore]] = {}
    share = are_shares(run.rows)
    for row in run.rows:
        for key in score_keys(row):
            score = HeldOutScore(int(row["step"]), row[key], row.get(f"{key}_low"), row.get(f"{key}_high"), share)
            found.setdefault(key, []).append(score)
    return found


def clear_change(before: HeldOutScore, after: HeldOutScore) -> int:
    """Return 1 if the interval of `after` lies above `before`'s, -1 if below, 0 if they overlap or one is missing."""
    if None in (before.low, before.high, after.low, after.high):
        return 0
    return int(after.low > before.high) - int(after.high < before.low)  # type: ignore[operator]


def moved_scores(run: Run, direction: int) -> dict[str, tuple[HeldOutScore, HeldOutScore]]:
    """Return (first, last) of the held-out scores that clearly rose (1) or fell (-1), by name. One set needs no name."""
    found = scores(run)
    several = len(set(map(score_set, found))) > 1
    moved: dict[str, tuple[HeldOutScore, HeldOutScore]] = {}
    for key, (first, *others) in found.items():
        if others and clear_change(first, others[-1]) == direction:
            moved.setdefault(f"held-out score{f' of {benchmark_of(key)}' if several else ''}", (first, others[-1]))
    return moved


def benchmark_of(key: str) -> str:
    return printable(score_set(key), 60)
