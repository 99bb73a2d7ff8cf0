"""Aggregates: the share of each token in the objective of an update. `loss.aggregate` names one.

Shares are computed for all sequences of an update at once, so micro-batches and ranks only add up. B counts every sequence that
has a token, rejected ones included. d_i is the divisor of sequence i from the correction: its response tokens, or its kept ones.
"""

# B sequences, T response tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Divides = Literal["sequence", "batch", "nothing"]
"""Use of the correction's divisors: each divides its sequence, their sum divides the batch, or they are ignored."""


def sequence_mean(mask: Tensor, divisors: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(B d_i): the mean over sequences of their mean over tokens (GRPO)."""
    mask_BT = mask.bool()
    return mask_BT / (_sequences(mask_BT) * divisors[:, None])


def token_mean(mask: Tensor, divisors: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(sum_i d_i): the mean over all tokens of the update (DAPO)."""
    mask_BT = mask.bool()
    return mask_BT / divisors.where(mask_BT.any(dim=1), 0).sum().clamp(min=1)


def constant(mask: Tensor, divisors: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(B max_tokens): the same share for a token of any sequence (Dr. GRPO)."""
    mask_BT = mask.bool()
    return mask_BT / (_sequences(mask_BT) * max_tokens).to(divisors.dtype)


def _sequences(mask_BT: Tensor) -> Tensor:
    """Return the number of sequences that have a token."""
    return mask_BT.any(dim=1).sum().clamp(min=1)


@dataclass(frozen=True)
class Aggregate:
    shares: Callable[[Tensor, Tensor, int], Tensor]
    """Function from (mask [B, T], divisors [B], max_tokens) of the whole update to [B, T]."""
    divides: Divides


AGGREGATES = {
    "sequence": Aggregate(sequence_mean, "sequence"),
    "token": Aggregate(token_mean, "batch"),
    "constant": Aggregate(constant, "nothing"),
}
