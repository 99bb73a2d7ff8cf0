"""Describe a run in sentences: whether it collapsed, its gains, its KV savings, and the mismatch of sampler and learner."""

import math
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from ..config import AlertsConfig
from ..format import counted, size
from ..monitor.alerts import check
from ..monitor.budget import WORDS
from ..monitor.limits import limit
from .curve import Curve
from .held_out import benchmark_of, clear_change, moved_scores, scores
from .runs import Run

State = Literal["collapsed", "fell", "flat", "learned", "early", "empty"]

LABELS: dict[str, str] = {
    "collapsed": "collapsed",
    "fell": "fell back",
    "flat": "no clear gain",
    "learned": "learned",
    "early": "too early to say",
    "empty": "no data",
}
FEWEST = 6
"""Minimum number of steps for a verdict."""
SURE = 3.0
"""Number of standard errors above which a trend counts as real."""
SURE_OF_BEST = 4.0
"""Number of standard errors above which a fall from the best window counts. It is higher, because the best window is also
the luckiest of many."""
FAR_BELOW = 0.75
"""The sampler's cache counts as too small if its score is below this share of the dense one and their intervals are disjoint."""
MOST_REJECTED = 0.5
"""The sampler's cache counts as too small if the share of rejected rollouts in the first step exceeds this value."""


@dataclass
class Verdict:
    state: State
    sentences: list[str] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)
    """Signs of failure, most important first; see `signs`."""

    @property
    def label(self) -> str:
        return LABELS[self.state]


def verdict(run: Run) -> Verdict:
    reward, entropy = Curve(run, "reward/mean"), Curve(run, "policy/entropy")
    if not run.rows:
        return Verdict("empty", ["No metrics yet: metrics.jsonl is empty."])
    state, why = _state(run, reward, entropy)
    found = signs(run, learned=state == "learned")
    sentences = [f"Signs: {_and(found)}."] if found else []
    sentences += [
        *_cache_too_small(run),
        *_skipped(run),
        *_rewards(run, reward),
        *_held_out(run),
        *_savings(run),
        *_budget(run),
        *_mismatch(run),
    ]
    return Verdict(state, [why, *sentences], found)


# Collapse


def _state(run: Run, reward: Curve, entropy: Curve) -> tuple[State, str]:
    if len(reward.values) < FEWEST:
        return "early", (
            f"Too early to judge learning or collapse: the run has {counted(len(reward.values), 'step')}, and {FEWEST} are "
            "needed."
        )
    step, best = reward.best
    floor = min(0.0, *reward.values)
    fall, sure = best - reward.last, SURE_OF_BEST * reward.error
    if fall > sure and fall > _limit(run, "reward") * (best - floor):
        return "collapsed", f"Collapse: yes. The mean reward fell from {best:.3g} around step {step} to {reward.last:.3g}."
    crashed = bool(entropy) and entropy.first > 0 and entropy.last < _limit(run, "entropy") * entropy.first
    if crashed and not _gained(run, reward):  # low entropy is expected once a task is solved
        return "collapsed", (
            f"Collapse: yes, of the entropy. It fell from {entropy.first:.3g} to {entropy.last:.3g}: answers are nearly "
            "identical, and exploration has stopped."
        )
    if fallen := moved_scores(run, -1):
        broken = {name: ends for name, ends in fallen.items() if ends[1].mean < _limit(run, "reward") * ends[0].mean}
        name, (before, after) = next(iter((broken or fallen).items()))
        words = f"{name} fell from {before} to {after}."
        return ("collapsed", f"Collapse: yes. The {words}") if broken else ("fell", f"Collapse: no, but the {words}")
    if fall > sure and reward.last < reward.first:
        return "fell", (
            f"Collapse: no, but the mean reward fell back from {best:.3g} around step {step} to {reward.last:.3g}."
        )
    if _gained(run, reward):
        rose = moved_scores(run, 1)
        words = f"the mean reward went from {reward.first:.3g} to {reward.last:.3g}"
        if rose and reward.trend <= SURE:
            name, (before, after) = next(iter(rose.items()))
            words = f"the {name} rose from {before} to {after}"
        note = f", while the entropy fell from {entropy.first:.3g} to {entropy.last:.3g}" if crashed else ""
        return "learned", f"Collapse: no. The run learned: {words}{note}."
    return "flat", (
        f"Collapse: no. No clear gain: the mean reward went from {reward.first:.3g} to {reward.last:.3g}, within its noise."
    )


def _gained(run: Run, reward: Curve) -> bool:
    return len(reward.values) >= FEWEST and (reward.trend > SURE or bool(moved_scores(run, 1)))


def signs(run: Run, *, learned: bool) -> list[str]:
    """Return the signs of failure found in the metrics, most important first.

    A rise of entropy is not a sign of failure in a run that learned.
    """
    found = ["the sampler's cache was too small from the start"] if _cache_too_small(run) else []
    entropy, cut = Curve(run, "policy/entropy"), Curve(run, "response/truncated")
    if not learned and entropy and entropy.start > 0 and entropy.last > 2 * entropy.start:
        found.append(f"answers became noise (entropy {entropy.start:.2g} → {entropy.last:.2g})")
    rejected = Curve(run, "sparse/rejection_rate")
    if rejected and max(rejected.last, rejected.mean) > _limit(run, "rejected"):
        found.append(f"{rejected.mean:.0%} of rollouts were rejected")
    k3, p05 = Curve(run, "sparse/mismatch_k3"), Curve(run, "sparse/xi_p05")
    if _drifts(k3):
        found.append(f"sampler and learner drifted apart (mismatch k3 {k3.start:.2g} → {k3.last:.2g})")
    elif p05 and p05.mean < _limit(run, "xi_p05"):
        found.append(f"sampler and learner were far apart throughout (5th percentile of ξ {p05.mean:.2g})")
    if cut and cut.last > 0.3 and cut.last > 1.5 * cut.start:
        found.append(f"answers are truncated more often ({cut.start:.0%} → {cut.last:.0%} cut off)")
    length = Curve(run, "response/mean_tokens")
    if length and length.last < _limit(run, "length") * length.start:
        found.append(f"answers shrank ({length.start:.0f} → {length.last:.0f} tokens)")
    same = Curve(run, "reward/zero_std_groups")
    if same and same.last > _limit(run, "zero_std_groups") and not _skipped(run):  # `_skipped` already reports this
        found.append(f"{same.last:.0%} of the groups gave no signal because their rewards were equal")
    failed = [Curve(run, f"reward/{name}") for name in ("timeouts", "errors")]
    if any(curve and curve.last > 0 for curve in failed):
        found.append("the reward function failed on some rollouts")
    return found


def _limit(run: Run, name: str) -> float:
    return limit(run.settings.limits if run.settings else None, name)


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# Sentences


def _cache_too_small(run: Run) -> list[str]:
    """Return a sentence if the sampler's cache failed before training: a far lower score, or many rejections."""
    found, cost = scores(run), []
    for key, (sparse, *_) in found.items():
        dense = found.get(key.removesuffix("_sparse"), [sparse])[0]
        far = sparse.mean < FAR_BELOW * dense.mean and clear_change(dense, sparse) < 0
        if far and sparse.step == dense.step == 0:
            cost.append(f"the model scores {sparse} on {benchmark_of(key)} with this cache and {dense} with a dense cache")
    rejected = Curve(run, "sparse/rejection_rate")
    if rejected and rejected.values[0] > MOST_REJECTED:
        cost.append(f"{rejected.values[0]:.0%} of the rollouts of step {rejected.steps[0]} were rejected")
    if not cost:
        return []
    remedy = run.kv.remedy.capitalize()
    return [f"Sampler's cache: too small from the start ({_and(cost)}). {remedy} before changing anything else."]


def _skipped(run: Run) -> list[str]:
    idle = list(takewhile(_no_update, reversed(run.steps)))
    equal = all(row.get("reward/zero_std_groups") == 1 for row in idle)
    why = "the rewards of each group were equal" if equal else "all rollouts with a signal were rejected or not finite"
    holds = {alert.name: alert for alert in check(run.rows, AlertsConfig(), run.kv) if alert.ended is None}
    alert = holds.get("zero_std_groups" if equal else "no_update")
    if alert is None or len(idle) < AlertsConfig().steps:
        return []
    return [f"Updates: skipped since step {idle[-1]['step']:.0f}, because {why}. Try: {alert.remedy}."]


def _no_update(row: dict[str, float]) -> bool:
    return row.get("policy/skipped_updates", 0) > 0 and "policy/loss" not in row


def _rewards(run: Run, reward: Curve) -> list[str]:
    if not reward:
        return ["No training step has been logged yet."]
    planned = f" of {run.planned_steps}" if run.planned_steps and run.last_step < run.planned_steps else ""
    if len(reward.values) < FEWEST:
        return [f"Training reward: {reward.values[-1]:.3g} at step {run.last_step}{planned}."]
    return [
        f"Training reward: {reward.first:.3g} in the first {counted(reward.window, 'step')}, {reward.last:.3g} in the last "
        f"{reward.window}, {run.last_step} steps{planned} in total."
    ]


def _held_out(run: Run) -> list[str]:
    sentences = []
    for key, found in scores(run).items():
        benchmark = benchmark_of(key)
        cache = "the sampler's cache" if key.endswith("_sparse") else "a dense cache"
        if len(found) == 1:
            sentences.append(f"Held-out {benchmark} with {cache}: {found[0]} at step {found[0].step}.")
            continue
        judged = {1: "clearly better", -1: "clearly worse", 0: "the intervals overlap"}[clear_change(found[0], found[-1])]
        sentences.append(f"Held-out {benchmark} with {cache}: {found[0]} before, {found[-1]} after ({judged}).")
    return sentences


def _savings(run: Run) -> list[str]:
    saved, held, dense = (Curve(run, f"kv/{name}") for name in ("token_savings", "peak_bytes", "dense_bytes"))
    if not saved:
        return []
    most, would = (max(curve.values, default=0.0) for curve in (held, dense))
    sizes = f" {size(most)} were allocated; a dense cache would have held {size(would)}." if held and dense else ""
    if saved.mean < 0.005:
        less = "bytes, but no tokens" if held and dense and most < would else "none"
        return [f"Savings: {less}. Every token stayed in the cache.{sizes}"]
    if held and dense and most > would:
        sizes += " No memory was saved. Saving memory needs a smaller kv.budget, fewer rollout.slots, or longer answers."
    return [f"Savings: {saved.mean:.0%} of a dense cache's tokens were not held.{sizes}"]


def _mismatch(run: Run) -> list[str]:
    rejected, wasted = Curve(run, "sparse/rejection_rate"), Curve(run, "sparse/wasted_tokens")
    k3, p05 = Curve(run, "sparse/mismatch_k3"), Curve(run, "sparse/xi_p05")
    sentences = []
    if rejected:
        waste = f", with {wasted.mean:.1%} of the tokens" if wasted and wasted.mean > 0 else ""
        last = f" ({rejected.last:.1%} at the end)" if rejected.mean > 0 else ""
        sentences.append(f"Rejection: {rejected.mean:.1%} of rollouts{last}{waste}.")
    if k3 and p05:
        trend = "growing" if _drifts(k3) else "not growing"
        near = "negligible" if k3.mean < 1e-6 else f"k3 {k3.mean:.2g}, {trend}"
        sentences.append(f"Mismatch of sampler and learner: {near}; 19 of 20 tokens have ξ above {_below(p05.mean)}.")
    return sentences


def _budget(run: Run) -> list[str]:
    """Return a sentence about the budgets that `kv.budget = auto` chose; nothing for a fixed budget."""
    if not run.budgets:
        return []
    first, last = run.budgets[0]["after"], run.budgets[-1]["after"]
    changed = sum(0 < each["before"] != each["after"] for each in run.budgets)
    path = (
        f"stayed at {first:,} tokens"
        if not changed
        else f"went from {first:,} to {last:,} tokens in {counted(changed, 'change')}"
    )
    target = "" if run.target_rejected is None else f", to hold {run.target_rejected:.1%} {WORDS[run.correction.judged]}"
    return [f"Budget: set by the run, {path}{target}."]


def _drifts(k3: Curve) -> bool:
    return bool(k3) and k3.last > 0.01 and k3.last > 3 * k3.start


def _below(ratio: float) -> str:
    """Return the ratio as text, rounded down so that 0.9999 is not shown as 1."""
    return f"{math.floor(ratio * 1000) / 1000:g}" if ratio > 0.1 else f"{ratio:.2g}"
