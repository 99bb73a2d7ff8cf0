"""DAPO: every token of the update has the same weight, and the upper clip is wider (arXiv 2503.14476).

Its other parts are options of `advantage`: dropping groups without signal, and a soft penalty on overlong responses.
"""

# B sequences, T response tokens

from __future__ import annotations

from torch import Tensor

from .base import PolicyLoss
from .grpo import loss


def shares(mask: Tensor, divisors: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(sum_i d_i), d_i = |o_i|: the mean over tokens. Tokens of rejected sequences count in the denominator."""
    mask_BT = mask.bool()
    return mask_BT / divisors.where(mask_BT.any(dim=1), 0).sum().clamp(min=1)


DAPO = PolicyLoss(loss, shares, per="batch")
