"""R-KV: keep what the window attends to and drop what other keys already say (arXiv 2505.24133)."""

# B rows, H kv heads, T cached tokens, R rows of a tile of the similarity matrix, D head dimension

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Policy
from .window_attention import check_kernel, decode_importance, pool

TILE_ROWS = 256  # of the similarity matrix: for long rows [T, T] per head never exists


@dataclass(frozen=True)
class RKV(Policy):
    """score = mix * importance - (1 - mix) * redundancy."""

    kernel: int = 7
    """Width of the max pooling of the importance, in tokens; odd."""
    mix: float = 0.1
    """Weight of importance against redundancy: lambda of the paper, 0 to 1."""
    threshold: float = 0.5
    """Cosine similarity above which two keys count as similar."""

    uses_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel(self.kernel)
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix = {self.mix} must lie between 0 and 1.")
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold = {self.threshold} is a cosine and must lie between -1 and 1.")

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        importance_BHn = pool(decode_importance(queries, keys), self.kernel, "max")
        redundancy_BHn = redundancy(keys, self.threshold)[..., : importance_BHn.shape[-1]]
        return self.mix * importance_BHn - (1 - self.mix) * redundancy_BHn


def redundancy(keys_BHTD: Tensor, threshold: float) -> Tensor:
    """Softmax over the T keys of each key's mean cosine similarity to all keys, [B, H, T].

    In each row of the similarity matrix the diagonal counts 0, and so does the LAST column above the threshold
    (column 0 if there is none): of several similar keys the newest is not held to be redundant.
    """
    keys = keys_BHTD.float()
    unit_BHTD = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    unit_BHDT = unit_BHTD.transpose(-1, -2).contiguous()  # many small products on a CPU run faster on it
    total = keys.shape[2]
    column_T = torch.arange(total, device=keys.device)
    sums_BHT = keys.new_zeros(keys.shape[:3])
    for start in range(0, total, TILE_ROWS):
        rows = column_T[start : start + TILE_ROWS]
        similarity_BHRT = unit_BHTD[:, :, start : start + TILE_ROWS] @ unit_BHDT
        similarity_BHRT[:, :, rows - start, rows] = 0
        above_BHRT = similarity_BHRT > threshold
        from_end_BHR1 = above_BHRT.flip(-1).view(torch.uint8).argmax(dim=-1, keepdim=True)
        last_BHR1 = torch.where(above_BHRT.any(dim=-1, keepdim=True), total - 1 - from_end_BHR1, 0)
        similarity_BHRT.scatter_(-1, last_BHR1, 0)
        sums_BHT += similarity_BHRT.sum(dim=-2)
    return (sums_BHT / total).softmax(dim=-1)
