"""Random: give each key a fixed random priority from (row seed, head, position), so that the kept tokens are a uniform sample.

The row seed is the rollout's seed mixed with the layer. This policy is the control: if it is not worse on a task, the task
says nothing about the other policies.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...kernels.counter_rng import mix, uniform
from .base import Policy


@dataclass(frozen=True)
class Random(Policy):
    uses_seeds: ClassVar[bool] = True
    uses_values: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True
    compares_keys: ClassVar[bool] = False

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        rows, heads, total, _ = keys.shape
        device = keys.device
        if seeds is None:
            seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        if positions is None:
            positions = torch.arange(total, device=device).expand(rows, heads, total)
        head_seeds_BH = mix(seeds[:, None], torch.arange(heads, device=device))
        return uniform(head_seeds_BH[..., None], positions.long()).float()
