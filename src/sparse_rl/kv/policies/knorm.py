"""KNorm: keys with a small norm attract attention, so drop the large ones (arXiv 2406.11430)."""

from dataclasses import dataclass
from typing import ClassVar

from .base import Policy


@dataclass(frozen=True)
class KNorm(Policy):
    uses_values: ClassVar[bool] = False
    compares_keys: ClassVar[bool] = False

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return -keys.float().norm(dim=-1)
