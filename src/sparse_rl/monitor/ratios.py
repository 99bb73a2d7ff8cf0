"""Histogram of the log-prob ratios xi = pi_old / pi_sampler of a step.

xi.jsonl has one line per step, {"step": n, "counts": [...]}. Percentiles describe the bulk of the ratios; the counts show the
tail that a veto removes. Imports no torch.
"""

# N response tokens

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..config import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

LOW, HIGH, BINS = -8.0, 2.0, 50
"""Range and number of the bins, which have equal width in log10 xi. A bin excludes its upper edge. The first and the last bin
include all values outside the range."""


def count(log_xi_N: Tensor, stands_for_N: Tensor | None = None) -> list[int]:
    """Return the tokens per bin, before masking. A ratio that is not finite counts as e^-20, as in `correct`. `stands_for_N` is
    the number of tokens that each token represents; the counts are then estimates."""
    log10_xi_N = log_xi_N.detach().float().cpu().nan_to_num(nan=-LOG_RATIO_LIMIT) / math.log(10)
    place_N = ((log10_xi_N - LOW) * (BINS / (HIGH - LOW))).floor().clamp(0, BINS - 1).long()
    counts = place_N.bincount(weights=None if stands_for_N is None else stands_for_N.double(), minlength=BINS)
    return counts.round().long().tolist()
