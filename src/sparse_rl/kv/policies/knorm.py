"""KNorm: keys of small norm draw attention, so drop the large ones (arXiv 2406.11430)."""

from dataclasses import dataclass

from .base import Policy


@dataclass(frozen=True)
class KNorm(Policy):
    def scores(self, queries_BHWD, keys_BHTD, values_BHTD, *, seeds=None, positions=None):
        return -keys_BHTD.float().norm(dim=-1)
