"""Policy losses, one per file. `get` returns one by name. Pure functions on tensors."""

import difflib

from ...config import LossConfig
from ...errors import UserError
from .aggregate import AGGREGATES, Aggregate
from .base import LossInputs, PolicyLoss
from .cispo import CISPO
from .dapo import DAPO
from .dr_grpo import DR_GRPO
from .grpo import GRPO
from .gspo import GSPO

__all__ = ["LOSSES", "LossInputs", "PolicyLoss", "aggregate_of", "get"]

LOSSES: dict[str, PolicyLoss] = {"grpo": GRPO, "dr_grpo": DR_GRPO, "dapo": DAPO, "gspo": GSPO, "cispo": CISPO}


def get(name: str) -> PolicyLoss:
    """Return the policy loss with this name."""
    if name not in LOSSES:
        close = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(LOSSES)}."
        raise UserError(f"Unknown loss {name!r}: {hint}")
    return LOSSES[name]


def aggregate_of(loss: LossConfig) -> Aggregate:
    """Return the aggregate of a loss: `loss.aggregate`, or that of its paper."""
    return AGGREGATES[loss.aggregate or get(loss.name).aggregate]
