"""Measure the mismatch between the sampler with a bounded cache and the dense model, before any training.

Replaying every rollout with a dense cache gives xi = pi_dense / pi_sampler for each token. A second replay under the recorded
evictions gives the engine noise. If keys and values are quantised, a third replay sees every key as it was stored. It splits xi
into the parts of quantisation, pi_dense / pi_quantised, and of eviction, pi_quantised / pi_sampler. Log-probs come from the
untruncated softmax at the sampling temperature, so xi is also defined with top_p and top_k. In that case, xi compares the two
full softmaxes at the sampled tokens. `learner.mismatch` computes the figures of a budget, as for `kv.budget = "auto"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import KV, PRESETS, AlertsConfig, CorrectionSpec
from ..learner.mismatch import measure
from ..learner.replay import replay
from ..monitor.budget import Figures, Targets
from ..rollout.rollout import Rollout
from .benchmark import EvalSample

TOKENS_PER_PASS = {"cpu": 4096, "cuda": 16384}
PRESET = "paper"
"""Default correction preset. It rejects a sequence if any token has xi < 1e-4."""
RULES = ("veto", "drop", "low", "high")
"""Options of a correction that decide rejections."""


@dataclass(frozen=True)
class Criteria:
    """Correction and limits by which a training run judges its budget."""

    spec: CorrectionSpec
    alerts: AlertsConfig

    def targets(self, kv: KV) -> Targets:
        """Return the targets of `kv.budget = "auto"`."""
        return Targets.of(kv, self.alerts, self.spec)

    @property
    def rules(self) -> dict[str, Any]:
        """Rules that differ from those of the default preset. `rejected` of the samples depends on them."""
        return {name: getattr(self.spec, name) for name in RULES if getattr(self.spec, name) != getattr(PRESETS[PRESET], name)}


@dataclass(frozen=True)
class Mismatch:
    """Mismatch metrics over all tokens of all rollouts, before any rejection."""

    figures: Figures
    """Figures that a budget is judged by."""
    rejection_rate: float
    unlikely: float
    """Share of rollouts with some xi below 1e-4, under any correction."""
    wasted_tokens: float
    mismatch_k1: float
    mismatch_k3: float
    xi_p05: float
    xi_p05_long: float
    """5th percentile of xi in the second half of the longest quarter of the responses; see `learner.correction.long_tail`."""
    xi_min: float
    ess: float
    engine_noise: float
    quantisation_k3: float | None = None
    """k3 of quantisation alone, at the sampled tokens; None if keys and values are not quantised."""
    eviction_k3: float | None = None
    """k3 of eviction alone, with quantised keys and values."""


@torch.no_grad()
def replay_samples(
    model: PreTrainedModel, rollouts: list[Rollout], samples: Sequence[EvalSample], spec: CorrectionSpec
) -> np.ndarray:
    """Return log xi of all tokens of all rollouts, concatenated, in float32. Set `rejected` and `noise` of each sample."""
    per_pass = TOKENS_PER_PASS.get(model.device.type, TOKENS_PER_PASS["cpu"])
    dense = [logprobs.cpu() for logprobs in replay(model, rollouts, "dense", tokens_per_pass=per_pass)]
    recorded = all(rollout.trace is not None for rollout in rollouts)
    own = [each.cpu() for each in replay(model, rollouts, "sparse", tokens_per_pass=per_pass)] if recorded else dense
    if rollouts[0].quantiser is not None:
        _split(samples, rollouts, dense, replay(model, rollouts, "quantised", tokens_per_pass=per_pass))
    log_xi = [ours - rollout.logprobs for ours, rollout in zip(dense, rollouts, strict=True)]
    for sample, rollout, replayed, drop in zip(samples, rollouts, own, measure(log_xi, spec).rejected, strict=True):
        sample.rejected, sample.noise = drop, float((rollout.logprobs - replayed).abs().mean())
    return torch.cat(log_xi).float().numpy()


def _split(samples: Sequence[EvalSample], rollouts: list[Rollout], dense: list[Tensor], quantised: list[Tensor]) -> None:
    for sample, rollout, all_keys, stored in zip(samples, rollouts, dense, quantised, strict=True):
        sample.quantisation_k3, sample.eviction_k3 = k3(all_keys - stored.cpu()), k3(stored.cpu() - rollout.logprobs)


def k3(log_ratio: Tensor) -> float:
    """Return mean(ratio - 1 - log ratio), which estimates a divergence."""
    return float((log_ratio.exp() - 1 - log_ratio).mean())


def summary(log_xi: Sequence[np.ndarray], samples: Sequence[EvalSample], spec: CorrectionSpec) -> Mismatch:
    """Return the mismatch metrics over all tokens. `log_xi` holds one array per chunk."""
    found = measure(torch.from_numpy(np.concatenate(log_xi)).split([sample.tokens for sample in samples]), spec)
    tokens = sum(sample.tokens for sample in samples)
    split: dict[str, float] = {}
    if all(sample.quantisation_k3 is not None for sample in samples):
        split = {
            name: sum(getattr(sample, name) * sample.tokens for sample in samples) / tokens
            for name in ("quantisation_k3", "eviction_k3")
        }
    return Mismatch(
        figures=found.figures,
        engine_noise=sum((sample.noise or 0.0) * sample.tokens for sample in samples) / tokens,
        **{each.name: found.metrics[name] for each in fields(Mismatch) if (name := f"sparse/{each.name}") in found.metrics},
        **split,
    )
