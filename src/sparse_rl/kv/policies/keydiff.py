"""KeyDiff: drop the keys closest to the mean direction of all keys (arXiv 2504.15364)."""

from dataclasses import dataclass

import torch.nn.functional as F

from .base import Policy


@dataclass(frozen=True)
class KeyDiff(Policy):
    def scores(self, queries_BHWD, keys_BHTD, values_BHTD, *, seeds=None, positions=None):
        keys = keys_BHTD.float()
        anchor_BH1D = F.normalize(keys, dim=-1).mean(dim=2, keepdim=True)
        return -F.cosine_similarity(keys, anchor_BH1D, dim=-1)
