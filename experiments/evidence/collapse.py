"""Define a collapsed run, and the step at which its reward had fallen. docs/evidence.md uses these definitions."""

import math
import statistics
from dataclasses import dataclass

from curves import WINDOW, smooth
from raw import DENSE, Rows

FALL = 0.4
"""Share of its best value that the reward must lose to count as fallen."""


@dataclass(frozen=True)
class Ending:
    reward: float
    """Mean of the last ten rewards, divided by that of the best ten in a row."""
    before: float
    after: float
    """First and last test score with a dense cache."""
    half_width: float
    """Half the width of the (unpaired) 95 % interval of the change in score."""

    @property
    def collapsed(self) -> bool:
        """True if the last ten rewards are under half of the best ten, or if the score is below its start, clear of the interval."""
        return self.reward < 0.5 or self.after - self.before + self.half_width < 0


def ending(rows: Rows) -> Ending:
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    tens = [statistics.mean(rewards[at : at + 10]) for at in range(len(rewards) - 9)]
    scored = [row for row in rows if DENSE in row]
    first, last = scored[0], scored[-1]
    half_width = math.hypot(*((row[f"{DENSE}_high"] - row[f"{DENSE}_low"]) / 2 for row in (first, last)))
    return Ending(tens[-1] / max(tens), first[DENSE], last[DENSE], half_width)


def fall_step(rows: Rows) -> int | None:
    """Return the first step after the best reward at which the reward is lower by `FALL`; None if there is none.

    Rewards are means over `WINDOW` steps.
    """
    curve = smooth([(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row], statistics.mean)[WINDOW - 1 :]
    best, best_step = max((value, step) for step, value in curve)
    return next((int(step) for step, value in curve if step > best_step and value < (1 - FALL) * best), None)
