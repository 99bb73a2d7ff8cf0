"""What is done about the sampler not being the learner: weights, rejections, and how far the two were apart.

xi = pi_old / pi_sampler per token, the sparsity consistency ratio of Sparse-RL (arXiv 2601.10079). Every preset is a
`Point` of one space: how a token is weighed, which tokens and sequences are dropped, what a sequence is averaged over.
Functions on tensors by the tensors' own methods: importing the options loads no torch.
"""

# B sequences of one optimizer update, T response tokens; trailing 1: kept for broadcasting

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ..errors import UserError
from ..settings import Section

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 20.0  # |log xi| beyond it changes nothing that could still be used, and exp(20) squared fits float32

Weight = Literal["one", "token", "sequence", "mean"]
Drop = Literal["none", "token", "sequence", "mean"]
Divisor = Literal["tokens", "kept"]
Preset = Literal[
    "none", "paper", "released", "reject_only", "reweight_only", "tis", "icepop", "sequence_mask", "geometric_mask"
]


@dataclass(frozen=True)
class Point:
    """One correction in full. The levels: `token` is xi_t, `sequence` exp(sum_t log xi_t), `mean` exp(mean_t log xi_t)."""

    weight: Weight = "one"
    cap: float = math.inf
    normalize: bool = False
    veto: float = 0.0
    drop: Drop = "none"
    low: float = 0.0
    high: float = math.inf
    divisor: Divisor = "tokens"

    def __post_init__(self) -> None:
        bounded = self.low > 0 or self.high < math.inf
        if self.low >= self.high:
            raise UserError(
                f"correction.low = {self.low:g} and high = {self.high:g} would drop everything: low must be below high."
            )
        if bounded and self.drop == "none":
            raise UserError(
                f"correction.low = {self.low:g} and high = {self.high:g} bound nothing while correction.drop is none: "
                "set correction.drop to token, sequence or mean, or start from another preset."
            )
        if self.drop != "none" and not bounded:
            raise UserError(f"correction.drop = {self.drop} does nothing without bounds: set correction.low or high.")
        if self.cap < math.inf and self.weight == "one":
            raise UserError(
                f"correction.cap = {self.cap:g} caps nothing while every weight is one: set correction.weight to token, "
                "sequence or mean, or start from another preset."
            )


PRESETS: dict[str, Point] = {
    "none": Point(),
    "paper": Point(weight="token", veto=1e-4),
    "released": Point(weight="token", cap=1.5, normalize=True, veto=1e-4, drop="token", low=0.5, high=1.5, divisor="kept"),
    "reject_only": Point(veto=1e-4),
    "reweight_only": Point(weight="token"),
    "tis": Point(weight="token", cap=2.0),
    "icepop": Point(weight="token", drop="token", low=0.5, high=5.0),
    "sequence_mask": Point(weight="sequence", drop="sequence", high=3.0),
    "geometric_mask": Point(drop="mean", low=0.99, high=1.01),
}


class Correction(Section):
    """What is done about the sampler's policy not being the learner's: a preset, and values that replace its own."""

    section: ClassVar[str] = "correction"

    preset: Preset | None = Field(
        None,
        description="Where to start: none paper released reject_only reweight_only tis icepop sequence_mask geometric_mask; "
        "by default the method's own. Every other option here replaces one value of it.",
    )
    weight: Weight | None = Field(
        None, description="What a token's term is multiplied by: one, or the ratio of its token, sequence or (geometric) mean."
    )
    cap: float | None = Field(
        None, gt=0, allow_inf_nan=True, description="Weights are truncated to at most this; inf is never."
    )
    normalize: bool | None = Field(None, description="Whether weights are divided by their mean over the update's tokens.")
    veto: float | None = Field(None, ge=0, lt=1, description="Drop a sequence with any token's ratio below this; 0 is never.")
    drop: Drop | None = Field(
        None,
        description="What is dropped when its ratio leaves [low, high]: none, token, or the sequence by its product (sequence) "
        "or geometric mean (mean).",
    )
    low: float | None = Field(None, ge=0, description="Ratios below this are dropped; 0 is none.")
    high: float | None = Field(None, gt=0, allow_inf_nan=True, description="Ratios above this are dropped; inf is none.")
    divisor: Divisor | None = Field(
        None, description="What a sequence is averaged over, its KL term included: all its tokens, or those kept."
    )
    opsm: float | None = Field(
        None,
        ge=0,
        description="Drop a sequence of negative advantage whose mean log(sampler/learner) exceeds this, such as 0.5.",
    )

    def point(self, default: str) -> Point:
        """The correction in full; `default` is the preset where none is named."""
        options = self.model_dump(exclude={"preset", "opsm"}, exclude_none=True)
        return replace(PRESETS[self.preset or default], **options)


@dataclass(frozen=True)
class Corrected:
    """What each token counts. Rejected sequences still count in the loss's 1/B."""

    weights: Tensor
    """Float [B, T], detached: multiplies the surrogate of a token; 0 where it takes no part."""
    keep: Tensor
    """Bool [B, T]: valid and not dropped."""
    rejected: Tensor
    """Bool [B]: dropped by a rule on sequences (veto, a bound on its ratio, a ratio that is not finite)."""
    divisors: Tensor
    """Float [B], at least 1: response tokens, or those kept."""
    kl_mask: Tensor
    """Bool [B, T]: what the KL term runs over."""
    metrics: dict[str, float]
    """Of all valid tokens, `effective` after drops and the rest before; NaN where there are none."""


def correct(log_ratio: Tensor, mask: Tensor, preset: str | Point = "paper", **options: Any) -> Corrected:
    """Weights and drops for log_ratio = log pi_old - log pi_sampler, both [B, T]; `options` replace values of the preset.

    Call it once with all sequences of an optimizer update, of all ranks: `normalize` divides by a mean over them. A ratio
    that is not finite rejects its sequence under every preset (no weight mends it), and counts as xi = e^-20 (or e^20)
    in the metrics. The rules see log xi as it is; exp sees it clamped to +-20.
    """
    point = replace(preset, **options) if isinstance(preset, Point) else Correction(preset=preset, **options).point(preset)
    valid_BT = mask.bool()
    log_xi_BT = log_ratio.detach()
    log_xi_BT = log_xi_BT if log_xi_BT.itemsize >= 4 else log_xi_BT.float()
    broken_B = (valid_BT & ~log_xi_BT.isfinite()).any(dim=1)
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
    if point.normalize:  # m of the released code, over every valid token, dropped ones included
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
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): which sequences stay, bool [B].

    A sequence goes if A_i < 0 and mean_t (log pi_sampler - log pi_theta) > delta: a bad answer that the learner would
    hardly have given teaches it little. `logprobs` are the learner's own; all are [B, T] but `advantages`, [B].
    """
    gap_BT = (sampler - logprobs).detach().masked_fill(~mask.bool(), 0)
    gap_B = gap_BT.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return (advantages >= 0) | (gap_B <= delta)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _worth(weights_N: Tensor) -> float:
    """The effective sample size as a share: 1 where all weigh the same, 1/N where one has all the weight."""
    return (weights_N.sum() ** 2 / (weights_N.numel() * (weights_N**2).sum())).item()


def _metrics(log_xi_N: Tensor, weights_N: Tensor, valid_BT: Tensor, keep_BT: Tensor, rejected_B: Tensor) -> dict[str, float]:
    """Rejection, waste, what the weights are worth, and the distance of the two policies, over the N valid tokens."""
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
        "sparse/ess": _worth(xi_N),
        "sparse/effective": _worth(weights_N) if keep_BT.any() else 0.0,
    }
