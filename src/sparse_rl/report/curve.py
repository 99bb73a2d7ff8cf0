"""One metric over the training steps of a run: window means, trend and noise."""

import math
import statistics
from itertools import accumulate

from .runs import Run


class Curve:
    """One metric over the training steps, with its mean over windows of steps."""

    def __init__(self, run: Run, key: str):
        points = [(int(row["step"]), row[key]) for row in run.steps if key in row]
        self.steps, self.values = [step for step, _ in points], [value for _, value in points]
        self.window = max(3, len(points) // 10)

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def start(self) -> float:
        """Mean over the first tenth of the steps. The window is short, because a run may break early."""
        return statistics.fmean(self.values[: max(1, len(self.values) // 10)])

    @property
    def first(self) -> float:
        return statistics.fmean(self.values[: self.window])

    @property
    def last(self) -> float:
        return statistics.fmean(self.values[-self.window :])

    @property
    def best(self) -> tuple[int, float]:
        """(middle step of the window with the highest mean, that mean)."""
        sums = list(accumulate(self.values, initial=0.0))
        starts = range(max(1, len(self.values) - self.window + 1))
        start = max(starts, key=lambda place: sums[min(place + self.window, len(self.values))] - sums[place])
        middle = min(start + self.window // 2, len(self.steps) - 1)
        return self.steps[middle], statistics.fmean(self.values[start : start + self.window])

    @property
    def error(self) -> float:
        """Standard error of the difference between two window means, estimated from successive steps."""
        if len(self.values) < 3:
            return math.inf
        jumps = [later - earlier for earlier, later in zip(self.values, self.values[1:], strict=False)]
        return math.sqrt(statistics.fmean(jump * jump for jump in jumps) / self.window)

    @property
    def trend(self) -> float:
        """Slope of a linear fit over all steps, divided by its standard error."""
        line = statistics.linear_regression(self.steps, self.values)
        misses = [value - line.slope * step - line.intercept for step, value in zip(self.steps, self.values, strict=True)]
        spread = statistics.pvariance(self.steps) * len(self.steps)
        error = math.sqrt(math.fsum(miss * miss for miss in misses) / max(1, len(misses) - 2) / spread)
        if error:
            return line.slope / error
        return math.copysign(math.inf, line.slope) if line.slope else 0.0
