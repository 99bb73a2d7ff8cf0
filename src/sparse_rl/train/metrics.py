"""Compute the metrics of a step. docs/metrics.md defines each name. Mismatch metrics cover all rollouts, before masking."""

import functools
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from ..learner.update import UpdateResult
from ..monitor.budget import long_length
from ..rollout.engine import Engine
from ..rollout.rollout import Rollout
from ..rollout.stats import Stats
from .rollouts import FAILURES, RolloutBatch


def reward_metrics(batch: RolloutBatch) -> dict[str, float]:
    rewards = [sample.reward for sample in batch.samples if sample.reward is not None]
    return {
        "reward/mean": statistics.fmean(rewards) if rewards else math.nan,  # NaN is not written to metrics.jsonl
        "reward/std": statistics.pstdev(rewards) if rewards else math.nan,
        "reward/zero_std_groups": sum(group.equal_rewards for group in batch.groups) / len(batch.groups),
        "reward/dropped_groups": float(sum(group.is_dropped for group in batch.groups)),
        **{f"reward/{name}/mean": statistics.fmean(values) for name, values in batch.parts.items() if values},
        **{f"reward/{name}": float(batch.counts[name]) for name in FAILURES},
    }


def response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    return {
        "response/mean_tokens": sum(len(rollout.response) for rollout in rollouts) / len(rollouts),
        "response/p90_tokens": float(long_length([len(rollout.response) for rollout in rollouts])),
        "response/truncated": sum(rollout.finish != "stop" for rollout in rollouts) / len(rollouts),
        "response/repetition": sum(rollout.finish == "repetition" for rollout in rollouts) / len(rollouts),
    }


def kv_metrics(stats: Sequence[Stats], rollouts: Sequence[Rollout], engine: Engine) -> dict[str, float]:
    """Return the metrics of the cache over the `generate` calls that sampled these rollouts."""
    cache = engine.cache
    kept, dense = sum(each.kept_tokens for each in stats), sum(each.dense_tokens for each in stats)
    whole = functools.reduce(Stats.merged_with, stats)
    pages = {
        "kv/pool_used": whole.peak_pages / max(1, whole.pool_pages),
        "kv/page_waste": whole.page_waste,
        "kv/straggler_pages": whole.straggler_share,
    }
    if not engine.policy.evicts:
        pages |= {
            "kv/preemptions": float(whole.preemptions),
            "kv/recomputed_tokens": whole.recomputed_tokens / max(1, whole.tokens),
        }
    return {
        "kv/token_savings": 1 - kept / dense if dense else 0.0,
        "kv/peak_bytes": float(max(each.peak_kv_bytes for each in stats)),
        "kv/dense_bytes": float(cache.dense_bytes(max(each.dense_peak_tokens for each in stats))),
        "kv/peak_tokens": float(max(rollout.kv_peak for rollout in rollouts)),
        "kv/evictions": float(sum(each.compactions for each in stats)),
        "kv/budget": float(engine.kv.budget if engine.policy.evicts else longest_sequence(engine)),
        **(pages if whole.pool_pages else {}),
    }


def longest_sequence(engine: Engine) -> int:
    """Return the tokens of the longest sequence that a dense cache holds."""
    store = engine.cache.prompts
    assert store is not None
    return store.longest


def engine_noise(rollouts: Sequence[Rollout], replayed: Sequence[Tensor]) -> float:
    """Return the mean of |log pi_sampler - log pi_shadow,old|: the part of the mismatch caused by numerics alone."""
    gaps = torch.cat([rollout.logprobs - ours.cpu() for rollout, ours in zip(rollouts, replayed, strict=True)])
    return float(gaps.abs().mean())


def policy_metrics(updates: Sequence[UpdateResult], tokens: int, entropy: float, lr: float) -> dict[str, float]:
    learned = [each for each in updates if each.learned]

    def total(name: str) -> float:
        return sum(each.sums.get(name, 0.0) for each in updates if each.finite)

    metrics = {
        "policy/loss": sum(each.sums["loss"] for each in learned) / len(learned) if learned else math.nan,
        "policy/clip_ratio": total("clipped_tokens") / max(1, tokens),
        "policy/entropy": entropy,
        "policy/grad_norm": sum(each.grad_norm for each in learned) / len(learned) if learned else math.nan,
        "policy/lr": lr,
        "policy/skipped_updates": float(len(updates) - len(learned)),
    }
    for name in ("kl_ref", "distillation_kl"):
        if any(name in each.sums for each in updates):
            metrics[f"policy/{name}"] = total(name) / max(1.0, total("tokens"))  # mean over the tokens of all updates
    if any("opsm_dropped" in each.sums for each in updates):
        metrics["policy/opsm_dropped"] = total("opsm_dropped")
    if any("routing_choices" in each.sums for each in updates):
        metrics["routing/flip_rate"] = total("routing_flips") / max(1.0, total("routing_choices"))
    return metrics
