"""Dr. GRPO: GRPO with a constant divisor and advantages that are not divided by the standard deviation (arXiv 2503.20783).

The weight of a sample then depends neither on its length nor on its group.
"""

# B sequences, T response tokens

from __future__ import annotations

from torch import Tensor

from .base import PolicyLoss
from .grpo import loss


def shares(mask: Tensor, divisors: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(B max_tokens) for every token, independent of the response length."""
    mask_BT = mask.bool()
    sequences = mask_BT.any(dim=1).sum().clamp(min=1)
    return mask_BT / (sequences * max_tokens).to(divisors.dtype)


DR_GRPO = PolicyLoss(loss, shares, per="constant", std=False)
