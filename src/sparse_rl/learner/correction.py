"""Correct the mismatch between sampler and learner: token weights, rejected sequences and mismatch metrics.

xi = pi_old / pi_sampler per token is the sparsity consistency ratio of Sparse-RL (arXiv 2601.10079). Every preset is a
`CorrectionSpec`: how tokens are weighted, which tokens and sequences are dropped, and the divisor of a sequence. Pure
functions on tensors.
"""

# B sequences of one optimizer update, T response tokens; trailing 1: kept for broadcasting

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..config import LOG_RATIO_LIMIT as LIMIT
from ..config import CorrectionConfig, CorrectionSpec


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
    **options: Any,
) -> Corrected:
    """Return weights and drops for log_ratio = log pi_old - log pi_sampler, [B, T] like `mask`. `options` replace values of
    the preset.

    Call it once with all sequences of an optimizer update, of all ranks: `normalize` divides by a mean over them. A ratio that
    is not finite rejects its sequence under every preset (no weight fixes it), and counts as xi = e^-20 (or e^20) in the
    metrics. The rules use log xi as it is; exp uses it clamped to +-20.
    """
    point = (
        replace(preset, **options)
        if isinstance(preset, CorrectionSpec)
        else CorrectionConfig(preset=preset, **options).spec(preset)
    )
    valid_BT = mask.bool()
    log_xi_BT = log_ratio.detach()
    log_xi_BT = log_xi_BT if log_xi_BT.itemsize >= 4 else log_xi_BT.float()
    broken_B = (valid_BT & ~log_xi_BT.isfinite()).any(dim=1)
    if broken is not None:
        broken_B = broken_B | broken
    log_xi_BT = log_xi_BT.nan_to_num(nan=-LIMIT, posinf=LIMIT, neginf=-LIMIT).masked_fill(~valid_BT, 0)
    tokens_B1 = valid_BT.sum(dim=1, keepdim=True)
    sum_B1 = log_xi_BT.sum(dim=1, keepdim=True)
    levels = {"token": log_xi_BT, "sequence": sum_B1, "mean": sum_B1 / tokens_B1.clamp(min=1), "one": sum_B1 * 0}

    rejected_B = broken_B | (log_xi_BT < _log(point.veto)).any(dim=1)
    keep_BT = valid_BT
    if point.drop != "none":
        level = levels[point.drop]
        inside = (level >= _log(point.low)) & (level <= _log(point.high))
        if point.drop == "token":
            keep_BT = keep_BT & inside
        else:
            rejected_B = rejected_B | ~inside[:, 0]
    rejected_B = rejected_B & valid_BT.any(dim=1)
    keep_BT = keep_BT & ~rejected_B[:, None]

    weights_BT = levels[point.weight].clamp(-LIMIT, LIMIT).exp().clamp(max=point.cap).expand_as(log_xi_BT)
    if point.normalize:  # m of the released code, over every valid token, including dropped ones
        weights_BT = weights_BT / weights_BT[valid_BT].mean()
    weights_BT = weights_BT.masked_fill(~keep_BT, 0)
    counted_BT = keep_BT if point.divisor == "kept" else valid_BT
    return Corrected(
        weights=weights_BT,
        keep=keep_BT,
        rejected=rejected_B,
        divisors=counted_BT.sum(dim=1).clamp(min=1).to(log_xi_BT.dtype),
        kl_mask=counted_BT & ~broken_B[:, None],
        metrics=_metrics(log_xi_BT[valid_BT].clamp(-LIMIT, LIMIT), weights_BT[valid_BT], valid_BT, keep_BT, rejected_B),
    )


def opsm(logprobs: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Return the sequences kept by off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556), bool [B].

    A sequence is dropped if A_i < 0 and mean_t (log pi_sampler - log pi_theta) > delta: the learner would hardly give this bad
    answer and learns little from it. `logprobs` are the learner's own. All are [B, T] but `advantages`, [B].
    """
    gap_BT = (sampler - logprobs).detach().masked_fill(~mask.bool(), 0)
    gap_B = gap_BT.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return (advantages >= 0) | (gap_B <= delta)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _effective_share(weights_N: Tensor) -> float:
    """Return the effective sample size as a share: 1 if all weights are equal, 1/N if one has all the weight."""
    return (weights_N.sum() ** 2 / (weights_N.numel() * (weights_N**2).sum())).item()


def _metrics(log_xi_N: Tensor, weights_N: Tensor, valid_BT: Tensor, keep_BT: Tensor, rejected_B: Tensor) -> dict[str, float]:
    """Return the metrics over the N valid tokens: rejections, wasted tokens, effective sample size, and the mismatch of the
    two policies."""
    total = log_xi_N.numel()
    if total == 0:
        keys = ("rejection_rate", "wasted_tokens", "mismatch_k1", "mismatch_k3", "xi_p05", "xi_min", "ess", "effective")
        return {f"sparse/{key}": math.nan for key in keys}
    xi_N = log_xi_N.exp()
    return {
        "sparse/rejection_rate": rejected_B.sum().item() / valid_BT.any(dim=1).sum().item(),
        "sparse/wasted_tokens": 1 - keep_BT.sum().item() / total,
        "sparse/mismatch_k1": -log_xi_N.mean().item(),
        "sparse/mismatch_k3": (log_xi_N.expm1() - log_xi_N).mean().item(),  # xi - 1 - log xi, exact near 1
        "sparse/xi_p05": xi_N.kthvalue(math.ceil(0.05 * total)).values.item(),
        "sparse/xi_min": xi_N.min().item(),
        "sparse/ess": _effective_share(xi_N),
        "sparse/effective": _effective_share(weights_N) if keep_BT.any() else 0.0,
    }
