"""Correct the mismatch between sampler and learner: token weights, rejected sequences and mismatch metrics.

xi = pi_old / pi_sampler per token is the sparsity consistency ratio of Sparse-RL (arXiv 2601.10079). Every preset is a
`CorrectionSpec`: how tokens are weighted, which tokens and sequences are dropped, and the divisor of a sequence. Pure
functions on tensors.
"""

# B sequences of one optimizer update, T response tokens; trailing 1: kept for broadcasting

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import LOG_RATIO_LIMIT, PRESETS, CorrectionConfig, CorrectionSpec

LONGEST = 0.25
"""Share of the responses, longest first, that `long_tail` reads."""
METRICS = (
    "rejection_rate", "unlikely", "wasted_tokens", "mismatch_k1", "mismatch_k3", "xi_p05", "xi_min", "ess", "effective",
)  # fmt: skip


@dataclass(frozen=True)
class Weighed:
    """The part of a correction that is computed per sequence, independently of the other sequences of the update."""

    log_xi: Tensor
    """Float [B, T]: the log-ratio, 0 off the mask, finite."""
    raw: Tensor
    """Float [B, T], detached: weight of every valid token, dropped ones included, before `normalize`."""
    valid: Tensor
    """Bool [B, T]: the mask."""
    keep: Tensor
    """Bool [B, T]: valid and not dropped."""
    rejected: Tensor
    """Bool [B]: dropped by a rule on sequences (veto, a bound on the ratio, a ratio that is not finite)."""
    divisors: Tensor
    """Float [B], at least 1: response tokens, or kept tokens."""
    kl_mask: Tensor
    """Bool [B, T]: tokens of the KL term."""

    @property
    def weights(self) -> Tensor:
        """Float [B, T]: factor of a token's surrogate before `normalize`; 0 for tokens that are not in the loss."""
        return self.raw.masked_fill(~self.keep, 0)

    @property
    def mean_weight(self) -> Tensor:
        """m of the released code: the mean weight over every valid token, dropped ones included."""
        return self.raw[self.valid].mean()


@dataclass(frozen=True)
class Corrected:
    """Weight of each token and the dropped tokens and sequences. Rejected sequences still count in the loss's 1/B."""

    weights: Tensor
    """Float [B, T], detached: factor of a token's surrogate; 0 for tokens that are not in the loss."""
    keep: Tensor
    """Bool [B, T]: valid and not dropped."""
    rejected: Tensor
    """Bool [B]: dropped by a rule on sequences (veto, a bound on the ratio, a ratio that is not finite)."""
    divisors: Tensor
    """Float [B], at least 1: response tokens, or kept tokens."""
    kl_mask: Tensor
    """Bool [B, T]: tokens of the KL term."""
    metrics: dict[str, float]
    """Metrics over all valid tokens: `effective` after drops, the others before. NaN if there are no valid tokens."""


def correct(
    log_ratio: Tensor,
    mask: Tensor,
    preset: str | CorrectionSpec = "paper",
    *,
    broken: Tensor | None = None,
    row_weights: Tensor | None = None,
    **options: Any,
) -> Corrected:
    """Return weights and drops for log_ratio = log pi_old - log pi_sampler, [B, T] like `mask`. `options` replace values of
    the preset.

    Call it once with all sequences of an optimizer update, of all ranks: `normalize` divides by a mean over them. A ratio that
    is not finite rejects its sequence under every preset (no weight fixes it), and counts as xi = e^-20 (or e^20) in the
    metrics. The rules use the unclamped log xi; exp uses it clamped to +-20. `row_weights` [B] is the number of sequences that
    each one represents in the metrics; the default is 1.
    """
    if isinstance(preset, CorrectionSpec):
        spec = replace(preset, **options)
    else:
        spec = CorrectionConfig(preset=preset, **options).spec(preset)
    weighed = weigh(log_ratio, mask, spec, broken)
    raw_BT = weighed.raw / weighed.mean_weight if spec.normalize else weighed.raw
    weights_BT = raw_BT.masked_fill(~weighed.keep, 0)
    return Corrected(
        weights=weights_BT,
        keep=weighed.keep,
        rejected=weighed.rejected,
        divisors=weighed.divisors,
        kl_mask=weighed.kl_mask,
        metrics=_metrics(weighed, weights_BT, row_weights),
    )


def weigh(log_ratio: Tensor, mask: Tensor, spec: CorrectionSpec, broken: Tensor | None = None) -> Weighed:
    """Apply the rules of a correction to each sequence, without the mean of `normalize`. `broken` [B] are further sequences
    to reject. Never synchronizes with the device."""
    valid_BT = mask.bool()
    log_xi_BT = log_ratio.detach()
    log_xi_BT = log_xi_BT if log_xi_BT.itemsize >= 4 else log_xi_BT.float()
    broken_B = (valid_BT & ~log_xi_BT.isfinite()).any(dim=1)
    if broken is not None:
        broken_B = broken_B | broken
    log_xi_BT = log_xi_BT.nan_to_num(nan=-LOG_RATIO_LIMIT, posinf=LOG_RATIO_LIMIT, neginf=-LOG_RATIO_LIMIT).masked_fill(
        ~valid_BT, 0
    )
    tokens_B1 = valid_BT.sum(dim=1, keepdim=True)
    sum_B1 = log_xi_BT.sum(dim=1, keepdim=True)
    levels = {"token": log_xi_BT, "sequence": sum_B1, "mean": sum_B1 / tokens_B1.clamp(min=1), "one": sum_B1 * 0}

    rejected_B = broken_B | (log_xi_BT < _log(spec.veto)).any(dim=1)
    keep_BT = valid_BT
    if spec.drop != "none":
        level = levels[spec.drop]
        inside = (level >= _log(spec.low)) & (level <= _log(spec.high))
        if spec.drop == "token":
            keep_BT = keep_BT & inside
        else:
            rejected_B = rejected_B | ~inside[:, 0]
    rejected_B = rejected_B & valid_BT.any(dim=1)
    keep_BT = keep_BT & ~rejected_B[:, None]
    counted_BT = keep_BT if spec.divisor == "kept" else valid_BT
    return Weighed(
        log_xi=log_xi_BT,
        raw=levels[spec.weight].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=spec.cap).expand_as(log_xi_BT),
        valid=valid_BT,
        keep=keep_BT,
        rejected=rejected_B,
        divisors=counted_BT.sum(dim=1).clamp(min=1).to(log_xi_BT.dtype),
        kl_mask=counted_BT & ~broken_B[:, None],
    )


def opsm(logprobs: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Return the sequences kept by off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556), bool [B].

    A sequence is dropped if A_i < 0 and mean_t (log pi_sampler - log pi_theta) > delta: the learner would hardly give this bad
    answer and learns little from it. `logprobs` are the learner's. `advantages` is [B], the other tensors are [B, T].
    """
    gap_BT = (sampler - logprobs).detach().masked_fill(~mask.bool(), 0)
    gap_B = gap_BT.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return (advantages >= 0) | (gap_B <= delta)


def long_tail(log_xi: Sequence[Tensor], row_weights: Sequence[float] | None = None) -> float:
    """Return the 5th percentile of xi in the second half of the longest quarter of the responses. NaN if they are empty.

    A cache of a fixed budget keeps a smaller share of a longer response, so its mismatch grows along the response. The mean
    over all tokens hides that. `log_xi` has one tensor per response. `row_weights` is the number of responses that each one
    represents.
    """
    weights = [1.0] * len(log_xi) if row_weights is None else row_weights
    wanted, taken = LONGEST * sum(weights), 0.0
    values, counts = [], []
    for row in sorted(range(len(log_xi)), key=lambda row: -len(log_xi[row])):
        if taken >= wanted:
            break
        taken += weights[row]
        values.append(log_xi[row][len(log_xi[row]) // 2 :])
        counts.append(torch.full_like(values[-1], weights[row], dtype=torch.float64))
    log_xi_N = (
        torch.cat(values).nan_to_num(nan=-LOG_RATIO_LIMIT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        if values
        else torch.empty(0)
    )
    return _quantile(log_xi_N.exp(), torch.cat(counts), 0.05) if log_xi_N.numel() else math.nan


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _metrics(weighed: Weighed, weights_BT: Tensor, row_weights_B: Tensor | None) -> dict[str, float]:
    """Return the metrics over the N valid tokens: rejections, wasted tokens, effective sample size, and the mismatch of the
    two policies."""
    valid_BT, rejected_B = weighed.valid, weighed.rejected
    log_xi_N = weighed.log_xi[valid_BT].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if log_xi_N.numel() == 0:
        return {f"sparse/{name}": math.nan for name in METRICS}
    rows_B = valid_BT.any(dim=1).double() * (1 if row_weights_B is None else row_weights_B)
    count_N = rows_B[:, None].expand(valid_BT.shape)[valid_BT]  # tokens that each token represents
    total = count_N.sum()
    kept_N = weighed.keep[valid_BT]
    unlikely_B = (weighed.log_xi < math.log(PRESETS["paper"].veto)).any(dim=1)
    xi_N = log_xi_N.exp()

    def mean(values_N: Tensor) -> float:
        return ((values_N * count_N).sum() / total).item()

    return {
        "sparse/rejection_rate": ((rejected_B * rows_B).sum() / rows_B.sum()).item(),
        "sparse/unlikely": ((unlikely_B * rows_B).sum() / rows_B.sum()).item(),
        "sparse/wasted_tokens": 1 - mean(kept_N),
        "sparse/mismatch_k1": -mean(log_xi_N),
        "sparse/mismatch_k3": mean(log_xi_N.expm1() - log_xi_N),  # xi - 1 - log xi, exact near 1
        "sparse/xi_p05": _quantile(xi_N, count_N, 0.05),
        "sparse/xi_min": xi_N[count_N > 0].min().item(),
        "sparse/ess": _effective_share(xi_N, count_N),
        "sparse/effective": _effective_share(weights_BT[valid_BT], count_N) if bool((kept_N & (count_N > 0)).any()) else 0.0,
    }


def _effective_share(weights_N: Tensor, count_N: Tensor) -> float:
    """Return the effective sample size as a share: 1 if all weights are equal, 1/N if one has all the weight."""
    weighted_N = weights_N * count_N
    return (weighted_N.sum() ** 2 / (count_N.sum() * (weighted_N * weights_N).sum())).item()


def _quantile(values_N: Tensor, count_N: Tensor, share: float) -> float:
    """Return the smallest value that this share of all tokens does not exceed."""
    values_N, order_N = values_N.sort()
    reached_N = count_N[order_N].cumsum(dim=0)
    place = int(torch.searchsorted(reached_N, share * reached_N[-1] * (1 - 1e-12)))
    return values_N[min(place, len(values_N) - 1)].item()
