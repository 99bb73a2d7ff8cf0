"""KNorm: keys of small norm draw attention, so drop the large ones (arXiv 2406.11430)."""

from dataclasses import dataclass

from .base import Policy


@dataclass(frozen=True)
class KNorm(Policy):
    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return -keys.float().norm(dim=-1)
