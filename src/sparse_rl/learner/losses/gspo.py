"""GSPO: one ratio per sequence, the likelihood ratio to the power 1/|y|, clipped per sequence (arXiv 2507.18071)."""

# B sequences, T response tokens

from __future__ import annotations

from torch import Tensor

from ...config import LOG_RATIO_LIMIT
from .base import LossInputs, PolicyLoss, clipped_surrogate, log_ratios


def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the GSPO-token loss and its counts.

    s_{i,t} = sg[s_i] pi_theta(y_t)/sg[pi_theta(y_t)], s_i = (pi_theta(y)/pi_old(y))^(1/|y|). The value is s_i for every token,
    so clipping applies to whole sequences, while each token may have its own weight xi_t. If all weights are 1, value and
    gradient are those of GSPO.
    """
    delta_BT = log_ratios(inputs)
    log_s_B1 = delta_BT.sum(dim=1, keepdim=True) / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_s_BT = log_s_B1.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + (delta_BT - delta_BT.detach())
    return clipped_surrogate(log_s_BT.exp(), inputs)


GSPO = PolicyLoss(loss)
