"""KeyDiff: drop the keys closest to the mean direction of all keys (arXiv 2504.15364)."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from .base import Policy


@dataclass(frozen=True)
class KeyDiff(Policy):
    uses_values: ClassVar[bool] = False

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        anchor_BH1D = F.normalize(keys.float(), dim=-1).mean(dim=2, keepdim=True)
        return -F.cosine_similarity(keys.float(), anchor_BH1D, dim=-1)
