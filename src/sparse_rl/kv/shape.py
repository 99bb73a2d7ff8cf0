"""Shape of a model's keys, values and recurrent states, and the check that a cache of that shape fits into memory."""

import math
import os
from dataclasses import dataclass

import torch

from ..errors import UserError


@dataclass(frozen=True)
class LayerState:
    """One state tensor of a recurrent layer, for one sequence."""

    layer: int
    name: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheShape:
    """Shape, dtype and device of the cache for a model's attention."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    """Tokens that a query of a windowed layer sees, itself included; None if the model has no windowed layers."""
    windowed: tuple[int, ...] = ()
    """Windowed layers with keys, ascending. The other layers with keys see all tokens."""
    windowed_heads: tuple[int, int, int] | None = None
    """Query heads, kv heads and head dimension of the windowed layers, if they differ from those of the other layers."""
    readers: tuple[tuple[int, int], ...] = ()
    """Pairs (layer without keys, layer whose keys it reads)."""
    states: tuple[LayerState, ...] = ()
    """States of the model's recurrent layers."""
    attention_free: tuple[int, ...] = ()
    """Layers without attention, ascending."""

    @property
    def layers_with_keys(self) -> list[int]:
        without = {*self.attention_free, *self.sources}
        return [layer for layer in range(self.layers) if layer not in without]

    @property
    def full_layers(self) -> list[int]:
        """Layers with keys and without a window: a query sees all keys."""
        return [layer for layer in self.layers_with_keys if layer not in self.windowed]

    @property
    def sources(self) -> dict[int, int]:
        """Map from each layer without keys to the layer whose keys it reads."""
        return dict(self.readers)

    @property
    def index_of_layer(self) -> dict[int, int]:
        """Index in a cache of each layer whose attention sees all tokens."""
        return {layer: index for index, layer in enumerate(self.full_layers)}

    @property
    def full(self) -> "CacheShape":
        """Shape of only the layers whose attention sees all tokens."""
        return self._only(len(self.full_layers), (self.q_heads, self.kv_heads, self.head_dim))

    @property
    def local(self) -> "CacheShape":
        """Shape of only the windowed layers."""
        return self._only(len(self.windowed), self.windowed_heads or (self.q_heads, self.kv_heads, self.head_dim))

    def _only(self, layers: int, heads: tuple[int, int, int]) -> "CacheShape":
        return CacheShape(layers, *heads, self.dtype, self.device)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence."""
        return sum(state.nbytes for state in self.states)


def refuse_too_large(shape: CacheShape, needed_bytes: int, name: str, remedy: str) -> None:
    """Raise if a cache exceeds the total memory. If a smaller cache does not fit, the allocator raises."""
    if shape.device.type == "cuda":
        total, whose = torch.cuda.mem_get_info(shape.device)[1], "the GPU"
    else:
        total, whose = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    if needed_bytes > total:
        message = f"{name} takes {needed_bytes / 2**30:,.0f} GiB, but {whose} has {total / 2**30:,.0f}: {remedy}."
        raise torch.OutOfMemoryError(message) if shape.device.type == "cuda" else UserError(message)
