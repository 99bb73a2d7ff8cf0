"""Full: keep everything. The dense run, through the same code as the sparse ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Policy


@dataclass(frozen=True)
class Full(Policy):
    window: int = 0

    evicts: ClassVar[bool] = False

    def scores(self, queries_BHWD, keys_BHTD, values_BHTD, *, seeds=None, positions=None):
        return keys_BHTD.new_zeros(keys_BHTD.shape[:3], dtype=torch.float32)

    def select(self, queries_BHWD, keys_BHTD, values_BHTD, budget, *, seeds=None, positions=None, protected=None):
        rows, heads, total, _ = keys_BHTD.shape
        return torch.arange(total, device=keys_BHTD.device).expand(rows, heads, total)
