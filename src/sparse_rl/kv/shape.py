"""Shape of a model's keys and values, and the check that a cache of that shape fits into memory."""

import os
from dataclasses import dataclass

import torch

from ..errors import UserError


@dataclass(frozen=True)
class CacheShape:
    """Shape, dtype and device of the cache for a model's attention."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def refuse_too_large(shape: CacheShape, needed_bytes: int, name: str, remedy: str) -> None:
    """Raise if a cache exceeds the total memory. If a smaller cache does not fit, the allocator raises."""
    if shape.device.type == "cuda":
        total, whose = torch.cuda.mem_get_info(shape.device)[1], "the GPU"
    else:
        total, whose = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    if needed_bytes > total:
        sentence = f"{name} takes {needed_bytes / 2**30:,.0f} GiB, but {whose} has {total / 2**30:,.0f}: {remedy}."
        raise torch.OutOfMemoryError(sentence) if shape.device.type == "cuda" else UserError(sentence)
