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


def count(log_xi_N: Tensor) -> list[int]:
    """Return the number of tokens per bin, before masking. A non-finite ratio counts as e^-20, as in `correct`."""
    log10_xi_N = log_xi_N.detach().float().nan_to_num(nan=-LOG_RATIO_LIMIT) / math.log(10)
    place_N = (log10_xi_N - LOW) * (BINS / (HIGH - LOW))
    return place_N.floor().clamp(0, BINS - 1).long().bincount(minlength=BINS).tolist()
