"""Decide the budget of a run with `kv.budget = "auto"` from the figures of its steps. Pure functions. Imports no torch.

The budget rises if more rollouts are rejected than chance explains at the target, in the last step or in several together, or if
the mismatch of long responses exceeds its limit. It falls only after `WINDOW` steps with far fewer rejected rollouts, and not to
a budget that failed at similar lengths. Budgets are rungs of a coarse ladder, so that caches and graphs are rarely rebuilt.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from ..config import KV, AlertsConfig, CorrectionSpec
from ..config.kv import AUTO_MULTIPLE

RUNG = 1.25
"""Ratio of neighbouring budgets. Responses count as grown if they are longer by this ratio."""
WINDOW = 8
"""Steps at a budget before it may fall, and steps that are judged together."""
EVIDENCE = 8.0
"""Minimum number of rejections expected at the target before the budget may fall. If the true rate is the target, at most `ROOM`
of them are seen with a probability of 1.4 %."""
CHANCE, CHANCE_IF_GROWN = 0.001, 0.01
"""The budget rises if at least so many rejections have at most this probability at the target. The second applies if responses
have grown. With 64 rollouts in a step and a target of 2 %, 7 rejections suffice, or 5. Both are low because every step tests
several counts, and because rollouts of one prompt are often rejected together."""
ROOM = 0.25
"""Share of the target up to which the budget may fall."""
FAR = 2.0
"""Multiple of the target. The budget rises by two rungs if the rejections exceed even this by more than chance."""
RETRY_STEPS = 64
"""Steps after which a budget that failed may be tried again at the same response lengths."""
MOST_CHANGES = 256
"""Maximum number of changes that a checkpoint stores."""

WORDS = {"rejected": "rejected", "unlikely": "of rollouts with a xi below 1e-4"}
"""Description of the judged share of rollouts, by `CorrectionSpec.judged`."""


@dataclass(frozen=True)
class Figures:
    """Figures of the rollouts of a step, or of a probe."""

    rejected: float
    """Share of rollouts that a sequence rule rejects, or that are unlikely; see `CorrectionSpec.judged`."""
    rollouts: int
    """Measured rollouts."""
    tail: float
    """5th percentile of xi in long responses; see `learner.correction.long_tail`."""
    tokens: int
    """90th percentile of the response length."""


@dataclass(frozen=True)
class Targets:
    rejected: float
    tail: float = 0.0
    """Smallest tail; 0 if it is not limited."""
    judged: str = "rejected"
    """Word for the share: rejected, or unlikely if the correction rejects no sequence."""

    @classmethod
    def of(cls, kv: KV, alerts: AlertsConfig, spec: CorrectionSpec) -> Self:
        """Return the targets that a run with these options holds.

        `alerts.xi_p05 = auto` always stands for the lower limit: the higher one was measured over all tokens, and late in long
        responses the percentile is lower.
        """
        tail = alerts.resolved(corrected=True).xi_p05
        return cls(kv.target_rejected, tail if isinstance(tail, float) else 0.0, spec.judged)

    def met_by(self, figures: Figures) -> bool:
        return figures.rejected <= self.rejected and figures.tail >= self.tail

    def __str__(self) -> str:
        tail = f" and xi p05 of long responses at least {self.tail:g}" if self.tail else ""
        return f"at most {self.rejected:.1%} {WORDS[self.judged]}{tail}"


@dataclass(frozen=True)
class Count:
    """Rejected rollouts of some steps together."""

    rejected: int
    rollouts: int
    target: float
    """Share that may be rejected."""
    judged: str
    """See `Targets.judged`."""

    @classmethod
    def of(cls, window: Sequence[Figures], targets: Targets) -> "Count":
        rollouts = sum(each.rollouts for each in window)
        rejected = round(sum(each.rejected * each.rollouts for each in window))
        return cls(rejected, rollouts, targets.rejected, targets.judged)

    @property
    def expected(self) -> float:
        """Rejected rollouts at the target."""
        return self.target * self.rollouts

    def chance(self, multiple: float = 1.0) -> float:
        """Return the probability of at least so many rejections at this multiple of the target."""
        return chance_of(self.rejected, self.rollouts, min(1.0, multiple * self.target))

    def __str__(self) -> str:
        share = self.rejected / self.rollouts
        return f"{self.rejected} of {self.rollouts} rollouts {self.judged} ({share:.1%}, target {self.target:.1%})"


@dataclass(frozen=True)
class Failed:
    """The last budget that was too small."""

    budget: int
    tokens: int
    """90th percentile of the response length at that time."""
    steps: int = 0
    """Steps since then."""


@dataclass(frozen=True)
class BudgetState:
    """State of the controller. A checkpoint stores it."""

    budget: int
    tokens: int = 0
    """90th percentile of the response length when the budget was set."""
    window: tuple[Figures, ...] = ()
    """Figures of the latest steps at this budget."""
    failed: Failed | None = None
    is_limited: bool = False
    """True if the largest budget misses the targets, and the run has warned about it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BudgetState":
        """Return the state that `as_json` stored. Raise ValueError or TypeError if it is invalid."""
        state = cls(
            values["budget"],
            values["tokens"],
            tuple(Figures(**each) for each in values["window"]),
            Failed(**values["failed"]) if values["failed"] else None,
            values["is_limited"],
        )
        if type(state.budget) is not int or state.budget < 1:
            raise ValueError(f"budget is {state.budget!r:.40}")
        return state


@dataclass(frozen=True)
class Decision:
    state: BudgetState
    reason: str = ""
    """Why the budget changes; empty if it stays."""
    unmet: str = ""
    """Targets that the largest budget misses; empty if it meets them, or if the run has already warned."""


def chance_of(rejected: int, rollouts: int, share: float) -> float:
    """Return the probability of at least `rejected` rejections, if each of `rollouts` is rejected with probability `share`.

    The upper tail of a binomial distribution: all rollouts are taken as independent.
    """
    if rejected <= 0 or share >= 1:
        return 1.0
    log_share, log_rest = math.log(share), math.log1p(-share)
    total, log_orders = 0.0, math.lgamma(rollouts + 1)
    for count in range(rejected, rollouts + 1):
        rest = rollouts - count
        log_ways = log_orders - math.lgamma(count + 1) - math.lgamma(rest + 1)
        term = math.exp(log_ways + count * log_share + rest * log_rest)
        total += term
        if count > share * rollouts and term <= 1e-17 * total:  # the other terms are smaller
            break
    return min(1.0, total)


def ladder(least: int, most: int) -> list[int]:
    """Return the budgets from `least` to `most`, each a `RUNG` larger than the one before. The last is `most`."""
    found, size = [], float(least)
    while (rung := math.ceil(size / AUTO_MULTIPLE) * AUTO_MULTIPLE) < most:
        found += [rung] if rung not in found else []
        size *= RUNG
    return [*found, most]


def smallest(budgets: Sequence[int], meets: Callable[[int], bool | None]) -> int | None:
    """Return the smallest budget that meets the targets, by bisection, or None if none does.

    `meets` returns None for a budget that does not fit in memory. Larger ones are then not tried.
    """
    found, low, high = None, 0, len(budgets)
    while low < high:
        middle = (low + high) // 2
        met = meets(budgets[middle])
        if met:
            found = budgets[middle]
        low, high = (middle + 1, high) if met is False else (low, middle)
    return found


def long_length(lengths: Sequence[int]) -> int:
    """Return the 90th percentile of response lengths."""
    return sorted(lengths)[math.ceil(0.9 * len(lengths)) - 1]


def decide(figures: Figures, state: BudgetState, targets: Targets, budgets: Sequence[int]) -> Decision:
    """Return the decision after a step with these figures. `budgets` are all possible ones, in ascending order."""
    if not math.isfinite(figures.rejected):  # nothing was measured
        return Decision(state)
    state = _with_step(figures, state, targets)
    has_grown = figures.tokens > RUNG * state.tokens > 0
    whole, tail = Count.of(state.window, targets), sum(each.tail for each in state.window) / len(state.window)
    worst = _worst(state.window, targets, has_grown)
    if worst or tail < targets.tail:
        reason = str(worst) if worst else f"xi p05 of long responses {tail:.2f} (limit {targets.tail:g})"
        reason += f"; responses of {figures.tokens} tokens, {state.tokens} when the budget was set" if has_grown else ""
        higher = [budget for budget in budgets if budget > state.budget]
        if not higher:
            return Decision(replace(state, is_limited=True), unmet="" if state.is_limited else reason)
        rungs = 2 if worst and worst.chance(FAR) <= CHANCE else 1
        failed = Failed(state.budget, figures.tokens)
        return Decision(BudgetState(higher[:rungs][-1], figures.tokens, failed=failed), reason)
    state = replace(state, is_limited=False)
    lower = [budget for budget in budgets if budget < state.budget]
    has_room = whole.rejected <= ROOM * whole.expected and tail >= targets.tail + ROOM * (1 - targets.tail)
    is_sure = len(state.window) >= WINDOW and whole.expected >= EVIDENCE
    if not lower or not has_room or not is_sure or has_grown or _has_failed(lower[-1], figures.tokens, state.failed):
        return Decision(state)
    reason = f"{whole} in {len(state.window)} steps leave room"
    return Decision(BudgetState(lower[-1], figures.tokens, failed=state.failed), reason)


def _with_step(figures: Figures, state: BudgetState, targets: Targets) -> BudgetState:
    """Add a step. Drop the oldest steps that neither `WINDOW` nor `EVIDENCE` needs."""
    window = (*state.window, figures)
    while len(window) > WINDOW and targets.rejected * sum(each.rollouts for each in window[1:]) >= EVIDENCE:
        window = window[1:]
    failed = replace(state.failed, steps=state.failed.steps + 1) if state.failed else None
    return replace(state, window=window, failed=failed, tokens=state.tokens or figures.tokens)


def _worst(window: Sequence[Figures], targets: Targets, has_grown: bool) -> Count | None:
    """Return the least likely count of the last 1, 2, 4, … steps, or of all. None if chance explains it."""
    lengths = [2**power for power in range(len(window).bit_length()) if 2**power < len(window)]
    counts = [Count.of(window[-steps:], targets) for steps in (*lengths, len(window))]
    worst = min(counts, key=Count.chance)
    return worst if worst.chance() <= (CHANCE_IF_GROWN if has_grown else CHANCE) else None


def _has_failed(budget: int, tokens: int, failed: Failed | None) -> bool:
    """Return whether a budget was too small recently, for responses that were not much longer than `tokens`."""
    if failed is None or budget > failed.budget or failed.steps >= RETRY_STEPS:
        return False
    return tokens * RUNG > failed.tokens
