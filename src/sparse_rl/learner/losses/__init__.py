"""Policy losses, one per file. `get` returns one by name. Pure functions on tensors."""

from ...config import LossConfig
from ...errors import UserError
from ...text import did_you_mean
from .aggregate import AGGREGATES, Aggregate, Divides
from .base import LossInputs, PolicyLoss
from .cispo import CISPO
from .dapo import DAPO
from .dr_grpo import DR_GRPO
from .grpo import GRPO
from .gspo import GSPO

__all__ = ["LOSSES", "Divides", "LossInputs", "PolicyLoss", "aggregate_of", "get"]

LOSSES: dict[str, PolicyLoss] = {"grpo": GRPO, "dr_grpo": DR_GRPO, "dapo": DAPO, "gspo": GSPO, "cispo": CISPO}


def get(name: str) -> PolicyLoss:
    """Return the policy loss with this name."""
    if name not in LOSSES:
        raise UserError(f"Unknown loss {name!r}: {did_you_mean(name, LOSSES)}")
    return LOSSES[name]


def aggregate_of(loss: LossConfig) -> Aggregate:
    """Return the aggregate of a loss: `loss.aggregate`, or that of its paper."""
    return AGGREGATES[loss.aggregate or get(loss.name).aggregate]
