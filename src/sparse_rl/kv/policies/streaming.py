"""StreamingLLM: keep the sinks and the most recent tokens (arXiv 2309.17453)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Policy


@dataclass(frozen=True)
class Streaming(Policy):
    uses_values: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True
    compares_keys: ClassVar[bool] = False

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        rows, heads, total, _ = keys.shape
        return torch.arange(total, device=keys.device, dtype=torch.float32).expand(rows, heads, total)
