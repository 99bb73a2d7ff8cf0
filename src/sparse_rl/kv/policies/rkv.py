"""R-KV: keep the keys that the window attends to, and drop keys that are similar to others (arXiv 2505.24133)."""

from dataclasses import dataclass
from typing import ClassVar

from ...kernels.importance import decode_importance
from ...kernels.redundancy import redundancy
from .base import Policy
from .pooling import check_kernel, pool


@dataclass(frozen=True)
class RKV(Policy):
    """R-KV policy: score = mix * importance - (1 - mix) * redundancy."""

    kernel: int = 7
    """Width of the max pooling of the importance, in tokens; must be odd."""
    mix: float = 0.1
    """Weight of importance relative to redundancy, 0 to 1: lambda in the paper."""
    threshold: float = 0.5
    """Cosine similarity above which two keys count as similar."""

    uses_queries: ClassVar[bool] = True
    uses_values: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel(self.kernel)
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix = {self.mix} is invalid: it must be between 0 and 1.")
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold = {self.threshold} is invalid: a cosine must be between -1 and 1.")

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        importance_BHn = pool(decode_importance(queries, keys), self.kernel, "max")
        redundancy_BHn = redundancy(keys, self.threshold)[..., : importance_BHn.shape[-1]]
        return self.mix * importance_BHn - (1 - self.mix) * redundancy_BHn
