"""Plan a run: what fits on a GPU and what a step costs, from a model's config.json. Imports neither torch nor transformers."""

from .dimensions import Dimensions, dimensions
from .memory import Phase, Plan, make_plan
from .remedies import remedies

__all__ = ["Dimensions", "Phase", "Plan", "dimensions", "make_plan", "remedies"]
