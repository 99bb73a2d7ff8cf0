"""Shared parts of policy losses: inputs, the ratio of the learner to the old policy, and the clipped surrogate.

An objective is a sum over tokens. Each token's share of it (1/(B |o_i|) for GRPO) is computed once for all sequences of an
optimizer update. The loss and the metrics of a micro-batch are then plain sums. They do not depend on how the update is split
into micro-batches or distributed over ranks.
"""

# B sequences, T response tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """Inputs of one micro-batch, which is a subset of the update's rows. Log-probs are at the sampling temperature."""

    logprobs: Tensor
    """[B, T], with gradient: log pi_theta."""
    old_logprobs: Tensor
    """[B, T]: log pi_old, under the weights at rollout time."""
    advantages: Tensor
    """[B], one per sequence."""
    weights: Tensor
    """[B, T]: weights from the correction, 0 for tokens that are not in the loss."""
    mask: Tensor
    """Bool [B, T]: True for response tokens. Log-probs of other tokens are undefined."""
    shares: Tensor
    """[B, T], from the aggregate over the whole update."""
    clip_low: float
    clip_high: float


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and the aggregate of its paper."""

    loss: Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]
    """Function that returns (loss of the micro-batch, sums: `clipped_tokens`, `tokens`)."""
    aggregate: str = "sequence"
    """Name of its paper's aggregate."""
    std: bool = True
    """True if the loss's paper divides the advantage by the standard deviation of the group."""


def log_ratios(inputs: LossInputs) -> Tensor:
    """Return log w_t = log pi_theta - log pi_old, [B, T]. It is 0 without gradient outside the mask and where it is not
    finite.

    The correction rejects sequences with a non-finite ratio and sets their weights to 0. The ratio must be 0 too, because 0 *
    inf is NaN.
    """
    delta_BT = inputs.logprobs - inputs.old_logprobs
    return delta_BT.masked_fill(~(inputs.mask & delta_BT.isfinite()), 0)


def clipped_surrogate(ratio_BT: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return - sum share * weight * min(w A, clip(w, 1 - low, 1 + high) A), and the counts."""
    advantages_B1 = inputs.advantages[:, None]
    free_BT = ratio_BT * advantages_B1
    clipped_BT = ratio_BT.clamp(1 - inputs.clip_low, 1 + inputs.clip_high) * advantages_B1
    loss = -(inputs.shares * inputs.weights * free_BT.minimum(clipped_BT)).sum()
    return loss, sums(clipped_BT < free_BT, inputs)


def sums(clipped_BT: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """Return counts over all response tokens, including rejected ones. The counts of micro-batches can be added."""
    return {"clipped_tokens": (clipped_BT & inputs.mask).sum(), "tokens": inputs.mask.sum()}
