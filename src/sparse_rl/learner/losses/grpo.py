"""GRPO: mean over sequences of the mean clipped surrogate over tokens (arXiv 2402.03300), with the weights of Sparse-RL."""

# B sequences, T response tokens

from __future__ import annotations

from torch import Tensor

from ...config import LOG_RATIO_LIMIT
from .base import LossInputs, PolicyLoss, clipped_surrogate, log_ratios


def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -J and its counts.

    J = sum_i 1/(B |o_i|) sum_t xi_t min(w_t A_i, clip(w_t, 1 - low, 1 + high) A_i), w_t = pi_theta/pi_old.
    """
    return clipped_surrogate(log_ratios(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), inputs)


GRPO = PolicyLoss(loss)
