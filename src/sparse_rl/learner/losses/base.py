"""What every policy loss shares: its inputs, the ratio of learner to old policy, the clipped surrogate.

An objective is a sum over tokens. Each token's SHARE of it (1/(B |o_i|) for GRPO) is computed once for all sequences of an
optimizer update; the loss of a micro-batch is then a plain sum, and so are its metrics: nothing depends on how the update
is cut into micro-batches or spread over ranks.
"""

# B sequences, T response tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

LIMIT = 20.0  # |log ratio| beyond it would overflow in exp or in what multiplies it


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch: some rows of the update. Log-probs are at the sampling temperature."""

    logprobs: Tensor
    """[B, T], with gradient: log pi_theta."""
    old_logprobs: Tensor
    """[B, T]: log pi_old, the weights at rollout time."""
    advantages: Tensor
    """[B]"""
    weights: Tensor
    """[B, T], the correction's: 0 where a token takes no part."""
    mask: Tensor
    """Bool [B, T]: response tokens. Elsewhere the log-probs may hold anything."""
    shares: Tensor
    """[B, T], of the loss's own `shares` over the whole update."""
    clip_low: float
    clip_high: float


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and how it averages."""

    loss: Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]
    """(loss of the micro-batch, sums: `clipped_tokens`, `tokens`)."""
    shares: Callable[[Tensor, Tensor, int], Tensor]
    """(mask [B, T], divisors [B], max_tokens) of the whole update to [B, T]."""
    std: bool = True
    """Whether its paper divides the advantage by the group's standard deviation."""


def log_ratios(inputs: LossInputs) -> Tensor:
    """log w_t = log pi_theta - log pi_old, [B, T]; 0, without gradient, off the mask and where it is not finite.

    Sequences with a ratio that is not finite were rejected by the correction: their weights are 0, and 0 * inf is not.
    """
    delta_BT = inputs.logprobs - inputs.old_logprobs
    return delta_BT.masked_fill(~(inputs.mask & delta_BT.isfinite()), 0)


def clipped_surrogate(ratio_BT: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """- sum share * weight * min(w A, clip(w, 1 - low, 1 + high) A)."""
    advantages_B1 = inputs.advantages[:, None]
    free_BT = ratio_BT * advantages_B1
    clipped_BT = ratio_BT.clamp(1 - inputs.clip_low, 1 + inputs.clip_high) * advantages_B1
    loss = -(inputs.shares * inputs.weights * free_BT.minimum(clipped_BT)).sum()
    return loss, sums(clipped_BT < free_BT, inputs)


def sums(clipped_BT: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """Counts over all response tokens, kept or not; micro-batches add up."""
    return {"clipped_tokens": (clipped_BT & inputs.mask).sum(), "tokens": inputs.mask.sum()}
