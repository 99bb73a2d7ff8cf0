"""Dr. GRPO: GRPO with a constant divisor and advantages without std, so that no length or group weighs more (2503.20783)."""

# B sequences, T response tokens

from __future__ import annotations

from torch import Tensor

from .base import PolicyLoss
from .grpo import loss


def shares(mask: Tensor, divisors: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(B max_tokens) for every length."""
    mask_BT = mask.bool()
    sequences = mask_BT.any(dim=1).sum().clamp(min=1)
    return mask_BT / (sequences * max_tokens).to(divisors.dtype)


DR_GRPO = PolicyLoss(loss, shares, std=False)
