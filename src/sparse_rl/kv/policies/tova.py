"""TOVA: keep the keys that the last query attends to, averaged over all heads. All heads keep the same keys (arXiv
2401.06104)."""

from dataclasses import dataclass
from typing import ClassVar

from ...kernels.importance import window_logits
from .base import Policy


@dataclass(frozen=True)
class TOVA(Policy):
    window: int = 1

    uses_queries: ClassVar[bool] = True
    uses_values: ClassVar[bool] = False

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        weights_BHGT = window_logits(queries[:, :, -1:], keys).softmax(dim=-1).squeeze(-2)
        return weights_BHGT.mean(dim=(1, 2))[:, None].expand(keys.shape[:3])
