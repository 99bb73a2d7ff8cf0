"""Rules of alerts: the metrics that each rule reads, its test, and what to try. `alerts.py` applies them to the rows of a run.

Imports no torch.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..format import counted
from .limits import DEFAULTS

Row = Mapping[str, float]

EARLY = ("policy/grad_norm", "sparse/rejection_rate")
"""Metrics that are compared with their median over the first steps."""
EARLY_STEPS = 10
"""Number of first steps."""
REJECTED_RISE = 0.15
"""Increase of the rejected share over its usual value that raises an alert below the limit, too."""
TRUNCATED_RISE = 0.5
"""Increase of the share of truncated rollouts that raises an alert even if the reward has not fallen."""
REWARD_FALL = float(DEFAULTS.reward)
"""Share of its best value that the reward must lose to count as fallen."""
COUNTED = ("response/mean_tokens", "perf/rollout_s", "perf/rollout_tokens_per_s")
"""Metrics from which the number of rollouts is computed."""


@dataclass
class History:
    """Earlier values of a run, with which a step is compared."""

    recent: deque[float]
    """Most recent rewards."""
    best: float = -math.inf
    """First reward, or the highest mean over as many rewards as `recent` holds, if that is higher."""
    first: dict[str, float] = field(default_factory=dict)
    """First value of every metric."""
    spread: float = 0.0
    """Largest reward/std so far. If all rollouts of a step fail, its reward/std is 0 and does not measure noise."""
    early: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in EARLY})
    """Values of the metrics in `EARLY` in the first steps, at most `EARLY_STEPS` of them."""
    held_out: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Best held-out score of each benchmark with the lower end of its interval, by metric."""

    def add(self, now: Row) -> None:
        self.first = {**now, **self.first}
        self.spread = max(self.spread, now.get("reward/std", 0.0))
        for key, values in self.early.items():
            if len(values) < EARLY_STEPS and key in now:
                values.append(now[key])
        if "reward/mean" in now:
            self.recent.append(now["reward/mean"])
            if self.best == -math.inf or len(self.recent) == self.recent.maxlen:
                self.best = max(self.best, sum(self.recent) / len(self.recent))
        for score in held_out_scores(now):
            self.held_out[score] = max(self.held_out.get(score, (-math.inf, 0.0)), (now[score], now[f"{score}_low"]))

    def usual(self, key: str) -> float | None:
        """Return the median of a metric over the first steps; None before these are done."""
        values = self.early[key]
        return statistics.median(values) if len(values) == EARLY_STEPS else None


@dataclass(frozen=True)
class Rule:
    needs: tuple[str, ...]
    """Metrics that the rule reads."""
    judge: Callable[[Row, History, float], str | None]
    remedy: str
    """Suggested fix. `{cache}` stands for what lowers the mismatch of the run's cache, such as "raise kv.budget"."""
    after_fall: str = ""
    """Suggested fix if the reward has also fallen."""
    evaluates: bool = False
    """True if the rule reads held-out scores. These have intervals, so one evaluation starts or ends the alert."""


# Rule functions: (this step, earlier steps, limit) -> a message if the limit is exceeded


def _rollouts(now: Row) -> int:
    """Return the number of rollouts of a step: its tokens divided by the mean response length."""
    tokens = now["perf/rollout_tokens_per_s"] * now["perf/rollout_s"]
    return max(1, round(min(tokens / max(now["response/mean_tokens"], 1), 1e15)))  # a damaged row may hold any number


def _reward(now: Row, past: History, limit: float) -> str | None:
    """Return a message if the reward fell by more than the limit and by more than three standard errors of a step's mean.

    Rewards may have any scale and a mean near 0, so a relative limit alone is not sufficient.
    """
    value, best = now["reward/mean"], past.best
    chance = 3 * past.spread / math.sqrt(_rollouts(now))
    if best - value <= max(limit * abs(best), chance):
        return None
    return f"reward/mean is {value:.3g}, down from its best value {best:.3g} (limit {limit:.0%} less)"


def held_out_scores(now: Row) -> list[str]:
    """Return the held-out scores with a dense cache that have an interval, if a step was evaluated."""
    scores = [key for key in now if key.startswith("eval/") and key.endswith("/pass@1")]
    return [score for score in scores if f"{score}_low" in now and f"{score}_high" in now]


def _held_out(now: Row, past: History, limit: float) -> str | None:
    """Return a message if a score fell by more than the limit, and its interval is below that of the best score."""
    for score in held_out_scores(now):
        best, low = past.held_out[score]
        if best - now[score] > limit * abs(best) and now[f"{score}_high"] < low:
            return f"{score} is {now[score]:.3g}, down from {best:.3g} (limit {limit:.0%} less): training has made the model worse"
    return None


def has_fallen(now: Row, past: History) -> bool:
    return now.keys() >= set(RULES["reward"].needs) and _reward(now, past, REWARD_FALL) is not None


def _entropy(now: Row, past: History, limit: float) -> str | None:
    value, start = now["policy/entropy"], past.first["policy/entropy"]
    if start <= 0 or value >= limit * start:
        return None
    return (
        f"policy/entropy is {value:.2g}, {value / start:.0%} of its initial value {start:.2g} (limit {limit:.0%}): answers "
        "are becoming identical"
    )


def _repetition(now: Row, past: History, limit: float) -> str | None:
    value = now["response/repetition"]
    if value <= limit:
        return None
    return f"response/repetition is {value:.0%} (limit {limit:.0%}): these rollouts only repeat themselves"


def _truncated(now: Row, past: History, limit: float) -> str | None:
    cut, fell = "response/truncated", has_fallen(now, past)
    limit = limit if fell else max(limit, TRUNCATED_RISE)
    if now[cut] - past.first[cut] <= limit:
        return None
    rose = f"{cut} rose from {past.first[cut]:.0%} to {now[cut]:.0%} (limit {limit:.0%} more)"
    if fell:
        return (
            f"{rose} while reward/mean fell from its best value {past.best:.3g} to {now['reward/mean']:.3g}: rollouts loop "
            "or are noise"
        )
    return f"{rose}: answers no longer end within rollout.max_tokens, and the reward has not fallen"


def _length(now: Row, past: History, limit: float) -> str | None:
    value, start = now["response/mean_tokens"], past.first["response/mean_tokens"]
    if value >= limit * start:
        return None
    return (
        f"response/mean_tokens is {value:.0f}, {value / start:.0%} of its initial value {start:.0f} (limit {limit:.0%}): "
        "answers are getting shorter"
    )


def _grad_norm(now: Row, past: History, limit: float) -> str | None:
    value, usual = now["policy/grad_norm"], past.usual("policy/grad_norm")
    if usual is None or value <= limit * usual:
        return None
    return (
        f"policy/grad_norm is {value:.3g}, {value / max(usual, 1e-300):.3g} times the median of the first {EARLY_STEPS} steps "
        f"(limit {limit:g})"
    )


def _xi_p05(now: Row, past: History, limit: float) -> str | None:
    value = now["sparse/xi_p05"]
    if value >= limit:
        return None
    return (
        f"sparse/xi_p05 is {value:.2f}, initially {past.first['sparse/xi_p05']:.2f} (limit {limit:g}): for 5 % of tokens, "
        f"the ratio of the dense model's probability to the sampler's is at most {value:.2f}"
    )


def _rejected(now: Row, past: History, limit: float) -> str | None:
    rate, wasted = now["sparse/rejection_rate"], now["sparse/wasted_tokens"]
    usual = past.usual("sparse/rejection_rate")
    if usual is not None and usual + REJECTED_RISE < rate <= limit:
        return (
            f"sparse/rejection_rate is {rate:.0%}, usually {usual:.0%} in the first {EARLY_STEPS} steps (limit {REJECTED_RISE:.0%} "
            "more): the answers may outgrow the cache"
        )
    if max(rate, wasted) <= limit:
        return None
    return (
        f"sparse/rejection_rate is {rate:.0%} and sparse/wasted_tokens {wasted:.0%} (limit {limit:.0%}): these rollouts "
        "and tokens are sampled but not learned from"
    )


def _zero_std_groups(now: Row, past: History, limit: float) -> str | None:
    value = now["reward/zero_std_groups"]
    if value <= limit:
        return None
    return f"reward/zero_std_groups is {value:.0%} (limit {limit:.0%}): groups with equal rewards have no signal"


def _no_verdict(now: Row, past: History, limit: float) -> str | None:
    counts = [now[f"reward/{name}"] for name in ("no_verdict", "timeouts", "errors")]
    rollouts = _rollouts(now)
    if sum(counts) <= limit * rollouts:
        return None
    none, timeouts, errors = counts
    return (
        f"{sum(counts):.0f} of {rollouts} rollouts got no verdict (limit {limit:.0%}): {none:.0f} None, "
        f"{counted(int(timeouts), 'timeout')}, {counted(int(errors), 'error')}"
    )


def _no_update(now: Row, past: History, limit: float) -> str | None:
    if "policy/loss" in now or not now["policy/skipped_updates"] or now["reward/zero_std_groups"] == 1:
        return None
    return (
        "no update was applied although rewards differ: every sequence with a signal was rejected, or loss or gradient "
        "was not finite"
    )


RULES = {
    "reward": Rule(
        ("reward/mean", "reward/std", *COUNTED),
        _reward,
        "read rollouts first; continue from the best checkpoint (export --step best) with a lower optimizer.lr; {cache} "
        "if the mismatch grew",
    ),
    "held_out": Rule(
        (),
        _held_out,
        "continue from an earlier checkpoint; if training is sparse, use method sparse_rl and kv.protect_prompt, and "
        "{cache}; otherwise lower optimizer.lr",
        evaluates=True,
    ),
    "entropy": Rule(
        ("policy/entropy",),
        _entropy,
        "lower optimizer.lr, widen the upper clip (loss.clip_high 0.28), or set a small loss.entropy_coef or loss.kl_coef",
    ),
    "repetition": Rule(
        ("response/repetition",),
        _repetition,
        "read these rollouts; {cache}, or lower optimizer.lr",
    ),
    "truncated": Rule(
        ("response/truncated", "reward/mean"),
        _truncated,
        "read rollouts: raise rollout.max_tokens if answers need it, or change the reward if it favors length; otherwise "
        "continue from an earlier checkpoint and lower optimizer.lr or {cache}",
        after_fall="read rollouts first; continue from an earlier checkpoint and {cache}, lower optimizer.lr or set "
        "loss.kl_coef",
    ),
    "length": Rule(
        ("response/mean_tokens",),
        _length,
        "read the rollouts with the highest reward: the reward may accept very short answers; {cache} if long "
        "answers are rejected",
    ),
    "grad_norm": Rule(
        ("policy/grad_norm",),
        _grad_norm,
        "if sparse/mismatch_k3 grows too, use method sparse_rl instead of naive and {cache}; otherwise lower "
        "optimizer.lr; keep the checkpoints from before this step",
    ),
    "xi_p05": Rule(
        ("sparse/xi_p05",),
        _xi_p05,
        "use method sparse_rl instead of naive; otherwise {cache} before changing the correction; if eval pass@1 and pass@1_sparse "
        "stay close, lower alerts.xi_p05",
    ),
    "rejected": Rule(
        ("sparse/rejection_rate", "sparse/wasted_tokens"),
        _rejected,
        "{cache} or use another kv.policy",
    ),
    "zero_std_groups": Rule(
        ("reward/zero_std_groups",),
        _zero_std_groups,
        "use easier or harder problems, give partial credit in the reward, raise rollout.samples_per_prompt, or set "
        "rollout.refill, which replaces such groups",
        after_fall="lower optimizer.lr, from the start or from the best checkpoint: these problems were solved before",
    ),
    "no_verdict": Rule(
        ("reward/no_verdict", "reward/timeouts", "reward/errors", *COUNTED),
        _no_verdict,
        "see reward.log for the reason; fix the reward, or raise reward.timeout_s and reward.workers",
    ),
    "no_update": Rule(
        ("policy/skipped_updates", "reward/zero_std_groups", "reward/mean"),
        _no_update,
        "if all rollouts are rejected, {cache}; otherwise lower optimizer.lr or use float32",
    ),
}
"""Rules by the option that holds their limit. `no_update` has no limit."""
