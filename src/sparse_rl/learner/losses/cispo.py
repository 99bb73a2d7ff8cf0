"""CISPO: clip the importance weight and keep the gradient of every token (MiniMax-M1, arXiv 2506.13585).

The paper sets no effective lower bound: epsilon_low is 1 here, which never binds because w > 0. It tunes epsilon_high but does
not state the value. The default here is epsilon_high = 4, a weight of at most 5, as in ScaleRL (arXiv 2510.13786) and TRL.
"""

# B sequences, T response tokens

from __future__ import annotations

from torch import Tensor

from ...config import LOG_RATIO_LIMIT
from .base import LossInputs, PolicyLoss, log_ratios, sums


def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return - sum share xi_t sg[clip(w_t, 1 - low, 1 + high)] A_i log pi_theta. Only its gradient is meaningful."""
    ratio_BT = log_ratios(inputs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped_BT = ratio_BT.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    logprobs_BT = inputs.logprobs.masked_fill(~(inputs.mask & inputs.logprobs.isfinite()), 0)
    loss = -(inputs.shares * inputs.weights * clipped_BT * inputs.advantages[:, None] * logprobs_BT).sum()
    return loss, sums(clipped_BT != ratio_BT, inputs)


CISPO = PolicyLoss(loss, aggregate="token")
