"""Measure the mismatch of rollouts from log xi and a correction: metrics, and the figures that judge a budget.

A training run with `kv.budget = "auto"` and `sparse-rl eval --mismatch` both measure budgets with this function.
"""

# B rollouts, T response tokens of the longest

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import CorrectionSpec
from ..monitor.budget import Figures, long_length
from .batch import padded
from .correction import correct, long_tail


@dataclass(frozen=True)
class MeasuredRollouts:
    figures: Figures
    metrics: dict[str, float]
    """The `sparse/…` metrics of a training step with these rollouts."""
    rejected: list[bool]
    """True for each rollout that a rule on sequences rejects."""


def measure(log_xi: Sequence[Tensor], spec: CorrectionSpec) -> MeasuredRollouts:
    """Measure rollouts. `log_xi` has one tensor per rollout: log pi_dense - log pi_sampler of its response tokens."""
    lengths = [len(each) for each in log_xi]
    log_xi_BT = padded(log_xi)
    mask_BT = torch.arange(log_xi_BT.shape[1]) < torch.tensor(lengths)[:, None]
    corrected = correct(log_xi_BT, mask_BT, spec)
    metrics = corrected.metrics | {"sparse/xi_p05_long": long_tail(log_xi)}
    figures = Figures(metrics[spec.judged_metric], len(log_xi), metrics["sparse/xi_p05_long"], long_length(lengths))
    return MeasuredRollouts(figures, metrics, corrected.rejected.tolist())
