"""Cache of sliding-window layers: a ring buffer per slot with the last tokens of its sequence.

A query of such a layer sees itself and the `window` - 1 tokens before it. The token at position p is stored at p modulo the
capacity, so a new token replaces the one that leaves the window. Attention does not depend on the order of the keys. Policies
never evict from these layers. A trace does not record them, because the window determines which keys a query sees.
"""

# l windowed layers, S slots, H kv heads, C capacity, N packed tokens, n tokens of a piece, M written tokens, D head dimension

import torch
from torch import Tensor

from ..format import counted
from ..sizes import token_bytes
from .prompt_layout import PackedPrompts
from .shape import CacheShape, refuse_too_large


class WindowStore:
    def __init__(self, shape: CacheShape, slots: int, longest: int):
        """Allocate rings for sequences of at most `longest` tokens. A ring never holds more than the window."""
        assert shape.window is not None
        self.shape, self.slots, self.capacity = shape, slots, min(shape.window, longest)
        local = shape.local
        self.index_of_layer = {layer: index for index, layer in enumerate(shape.windowed)}
        refuse_too_large(
            shape,
            slots * self.capacity * token_bytes(local, shape.dtype.itemsize),
            f"The cache of {counted(slots, 'sliding window')} of {self.capacity:,} tokens",
            "use shorter sequences or fewer slots",
        )
        rows = (local.layers, slots, local.kv_heads, self.capacity, local.head_dim)
        self.keys_lSHCD = torch.zeros(rows, dtype=shape.dtype, device=shape.device)
        self.values_lSHCD = torch.zeros_like(self.keys_lSHCD)

    @property
    def kv_bytes(self) -> int:
        """Allocated bytes of keys and values."""
        return self.keys_lSHCD.nbytes + self.values_lSHCD.nbytes

    def fits(self, longest: int) -> bool:
        """Return whether sequences of this length fit."""
        assert self.shape.window is not None
        return self.capacity >= min(self.shape.window, longest)

    def clear(self) -> None:
        self.keys_lSHCD.zero_()
        self.values_lSHCD.zero_()

    def fill(self, layer: int, prompts: PackedPrompts, keys_1HND: Tensor, values_1HND: Tensor) -> None:
        """Write the last tokens of packed prompts. `prompts.recent` lists them for a ring of this capacity."""
        source_M, slots_M, places_M = prompts.recent
        for stored, new in ((self.keys_lSHCD, keys_1HND), (self.values_lSHCD, values_1HND)):
            stored[self.index_of_layer[layer], slots_M, :, places_M] = new[0, :, source_M].transpose(0, 1)

    def extend(self, layer: int, slot: int, start: int, keys_1HnD: Tensor, values_1HnD: Tensor) -> tuple[Tensor, Tensor]:
        """Write a piece of a prompt from `start` on into a slot. Return the keys and values of the tokens before it that the
        piece may see, and of the piece itself, in order."""
        index, capacity, tokens = self.index_of_layer[layer], self.capacity, keys_1HnD.shape[2]
        before = torch.arange(max(0, start - capacity), start, device=keys_1HnD.device) % capacity
        last = torch.arange(max(0, tokens - capacity), tokens, device=keys_1HnD.device)
        found = []
        for stored, new in ((self.keys_lSHCD, keys_1HnD), (self.values_lSHCD, values_1HnD)):
            found.append(torch.cat([stored[index, slot, None, :, before], new], dim=2))
            stored[index, slot, :, (start + last) % capacity] = new[0, :, last]
        return found[0], found[1]

    def append(self, layer: int, positions_S: Tensor, keys_SHD: Tensor, values_SHD: Tensor) -> None:
        """Write one new token of each of the first slots."""
        rows_S = torch.arange(len(positions_S), device=positions_S.device)
        self.keys_lSHCD[self.index_of_layer[layer], rows_S, :, positions_S % self.capacity] = keys_SHD
        self.values_lSHCD[self.index_of_layer[layer], rows_S, :, positions_S % self.capacity] = values_SHD

    def read(self, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return the rings [S, H, C, D] of the first slots."""
        return self.keys_lSHCD[self.index_of_layer[layer], :slots], self.values_lSHCD[self.index_of_layer[layer], :slots]

    def copy_slot(self, source: "WindowStore", source_slot: int, slot: int) -> None:
        """Copy a sequence from another slot, of this store or of another one with the same capacity."""
        self.keys_lSHCD[:, slot] = source.keys_lSHCD[:, source_slot]
        self.values_lSHCD[:, slot] = source.values_lSHCD[:, source_slot]

    def reorder(self, slots: Tensor) -> None:
        """Move the content of slot `slots[i]` to slot i, for beam search."""
        for tensor in (self.keys_lSHCD, self.values_lSHCD):
            tensor.copy_(tensor[:, slots])
