"""Plan a run from a model's config.json: GPU memory and step time. Imports neither torch nor transformers."""

from .dimensions import Dimensions, dimensions
from .memory import Phase, Plan, make_plan
from .remedies import remedies

__all__ = ["Dimensions", "Phase", "Plan", "dimensions", "make_plan", "remedies"]
