"""Pooling of scores along time."""

# B rows, H kv heads, n scored tokens

import torch.nn.functional as F
from torch import Tensor


def check_kernel(kernel: int) -> None:
    if not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel = {kernel!r} is invalid: it must be a positive odd number of tokens, such as 7.")


def pool(scores_BHn: Tensor, kernel: int, kind: str) -> Tensor:
    """Pool along time by maximum or average, with stride 1 and unchanged length."""
    pooling = F.max_pool1d if kind == "max" else F.avg_pool1d
    rows, heads, total = scores_BHn.shape
    flat = scores_BHn.reshape(rows * heads, 1, total)
    return pooling(flat, kernel_size=kernel, stride=1, padding=kernel // 2).view(rows, heads, total)
