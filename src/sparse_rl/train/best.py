"""Choose the best checkpoint of a run by the metric `checkpoint.best`, measured with the checkpoint's own weights."""

import math
from collections.abc import Callable

from ..config import CheckpointConfig
from .checkpoint import State


class Best:
    """Track the best checkpoint of a run by the metric `checkpoint.best`, in `State.best_step` and `State.best_value`.

    A step samples its rollouts before its update. Rollout metrics of step N + 1 therefore score the checkpoint of step N, and
    the last checkpoint has no score. Metrics under `eval/` are measured after the update and score the checkpoint of their own
    step.
    """

    def __init__(self, settings: CheckpointConfig, warn: Callable[[str], None]):
        self.metric, self.every, self.warn = settings.best, settings.every, warn
        self.held_out = self.metric.startswith("eval/")
        self.candidate = -1
        """Step of the checkpoint that the rollouts of the next step will score; -1 if there is none."""

    def saved(self, step: int) -> None:
        """Make the checkpoint of `step` the candidate for the best checkpoint.

        Only steps that are multiples of `checkpoint.every` are candidates. A checkpoint saved because the run stopped early is
        not. A resumed run therefore chooses the same best checkpoint as an uninterrupted run.
        """
        self.candidate = step if step % self.every == 0 else -1

    def after_step(self, state: State, metrics: dict[str, float]) -> None:
        if not self.held_out and 0 <= self.candidate == state.step - 1:
            self._score(state, self.candidate, metrics, missing=True)

    def before_save(self, state: State, metrics: dict[str, float], *, last: bool) -> None:
        if self.held_out:
            self._score(state, state.step, metrics, missing=last)

    def _score(self, state: State, step: int, metrics: dict[str, float], *, missing: bool) -> None:
        value = metrics.get(self.metric)
        if value is None and missing:
            self.warn(
                f"checkpoint.best = {self.metric} is not a metric of step {state.step}: no best checkpoint is kept, only "
                "the latest."
            )
        if value is not None and math.isfinite(value) and value > state.best_value:
            state.best_step, state.best_value = step, value

    def summary_line(self, state: State) -> str:
        """Return a sentence that names the best checkpoint, printed when a run ends. Empty if no checkpoint has a score."""
        if state.best_step < 0:
            return ""
        line = f"The best checkpoint by {self.metric} is step {state.best_step} ({state.best_value:.3g})."
        if not self.held_out:
            line += f" The last checkpoint, step {state.step}, has no score: no rollouts were sampled with its weights."
        return line
