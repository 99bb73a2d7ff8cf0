"""Dr. GRPO: GRPO with a constant divisor and an advantage without std, which weigh no length or group more (2503.20783)."""

# B sequences, T response tokens

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import PolicyLoss
from .grpo import loss

if TYPE_CHECKING:
    from torch import Tensor


def shares(mask: Tensor, divisors: Tensor, max_tokens: int) -> Tensor:
    """1/(B max_tokens), whatever the length."""
    mask_BT = mask.bool()
    sequences = mask_BT.any(dim=1).sum().clamp(min=1)
    return mask_BT / (sequences * max_tokens).to(divisors.dtype)


DR_GRPO = PolicyLoss(loss, shares, clip_low=0.2, clip_high=0.2, std=False)
