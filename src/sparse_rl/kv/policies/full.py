"""Full: keep every key. Dense runs use this policy, so they share all code with sparse runs."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Policy


@dataclass(frozen=True)
class Full(Policy):
    window: int = 0

    evicts: ClassVar[bool] = False

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return keys.new_zeros(keys.shape[:3], dtype=torch.float32)

    def select(self, queries, keys, values, budget, *, seeds=None, positions=None, protected=None, **more):
        rows, heads, total, _ = keys.shape
        return torch.arange(total, device=keys.device).expand(rows, heads, total)
