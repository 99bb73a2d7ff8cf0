"""The distribution of xi = pi_old / pi_sampler over the response tokens of a step: a histogram that a line can hold.

One line a step in xi.jsonl, {"step": n, "counts": [...]}: percentiles say where the bulk is, the counts show the tail that
a veto cuts. Importing it loads no torch.
"""

# N response tokens

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..learner.correction import LIMIT

if TYPE_CHECKING:
    from torch import Tensor

LOW, HIGH, BINS = -8.0, 2.0, 50
"""Bins of equal width in log10 xi, each from its lower edge to below its upper one; the first and the last also take what
lies beyond."""


def count(log_xi_N: Tensor) -> list[int]:
    """Tokens in each bin, before anything is masked. A ratio that is no number counts as `correct` counts it: as e^-20."""
    log10_xi_N = log_xi_N.detach().float().nan_to_num(nan=-LIMIT) / math.log(10)
    place_N = (log10_xi_N - LOW) * (BINS / (HIGH - LOW))
    return place_N.floor().clamp(0, BINS - 1).long().bincount(minlength=BINS).tolist()
