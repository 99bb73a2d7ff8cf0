"""Regularizers that are added to the policy loss: the per-token KL to a reference policy, and the weighted sum by shares."""

# B sequences, T response tokens

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ...config import LOG_RATIO_LIMIT

Estimator = Literal["k1", "k2", "k3"]


def kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Return estimates of KL(pi_theta || pi_ref) at each sampled token, [B, T], 0 outside the mask.

    With log r = log pi_ref - log pi_theta: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. As losses on samples of
    pi_theta they differ. The gradient of k1 has mean 0, so k1 is only a metric. k2 has the gradient of this KL. k3, the
    default as in GRPO, has the gradient of KL(pi_ref || pi_theta), which is the same to first order. On samples of another
    policy none is exact.
    """
    log_r_BT = (ref_logprobs - logprobs).masked_fill(~mask.bool(), 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -log_r_BT
    if estimator == "k2":
        return log_r_BT**2 / 2
    assert estimator == "k3"
    return log_r_BT.expm1() - log_r_BT


def weighted_sum(values: Tensor, mask: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of share * value over the mask, e.g. the KL or entropy term in the loss of a micro-batch."""
    return (values.masked_fill(~mask.bool(), 0) * shares).sum()
