"""The prompt store: keys and values of protected prompts, held once per group and read by the slots of all its samples.

The store is a fixed pool of pages. A group takes pages for its prompt when it is admitted, and returns them when its last
sample has ended. `PagePool` assigns pages on the host. `PromptStore` holds the tensors and one page table per slot.
"""

# L layers, S slots, H kv heads, N pages of the pool, T tokens of a page, D head dimension, P pages of the longest prompt, M
# written tokens, R rows of a tile ((layer, slot) pairs that are compacted together)

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.attention import gathered_prompts
from ..sizes import PAGE_TOKENS, page_table_width, pages_of, token_bytes
from .shape import CacheShape, refuse_too_large
from .storage import Quantiser, allocated, encoded


class PromptStore:
    def __init__(self, shape: CacheShape, slots: int, pages: int, longest: int, quantiser: Quantiser | None = None):
        """Allocate `pages` pages, and page tables for prompts of at most `longest` tokens."""
        self.shape, self.slots, self.pages, self.quantiser = shape, slots, pages, quantiser
        dtype = "auto" if quantiser is None else quantiser.dtype
        needed = pages * PAGE_TOKENS * token_bytes(shape, shape.dtype.itemsize, dtype)
        refuse_too_large(
            shape, needed, f"The prompt store of {pages:,} pages of {PAGE_TOKENS} tokens", "use shorter prompts or fewer slots"
        )
        self.stored = allocated((shape.layers, pages, shape.kv_heads, PAGE_TOKENS), shape, quantiser)
        self.pages_SP = torch.zeros(slots, page_table_width(longest), dtype=torch.int32, device=shape.device)

    @property
    def keys_LNHTD(self) -> Tensor:
        """Keys, or their codes; 4-bit codes are two to a byte."""
        return self.stored.keys

    @property
    def values_LNHTD(self) -> Tensor:
        return self.stored.values

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that the store can hold."""
        return min(self.pages, self.pages_SP.shape[1]) * PAGE_TOKENS

    @property
    def kv_bytes(self) -> int:
        """Allocated bytes of keys and values, with their steps."""
        return self.stored.nbytes

    @property
    def side_bytes(self) -> int:
        """Allocated bytes of the page tables."""
        return self.pages_SP.untyped_storage().nbytes()

    def clear(self) -> None:
        for tensor in (*self.stored, self.pages_SP):
            tensor.zero_()

    def write(self, layer: int, packed: "PackedPages", keys_1HND: Tensor, values_1HND: Tensor) -> None:
        """Write the keys and values of packed prompts into their pages, for one layer."""
        for stored, new in zip(self.stored, encoded(self.quantiser, layer, keys_1HND, values_1HND), strict=True):
            stored[layer][packed.pages_M, :, packed.places_M] = new[0].transpose(0, 1)

    def read(self, layer: int, pages_1P: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys, less the centre of quantised ones, and values [1, H, T, D] of a prompt, as attention reads them."""
        found = self.stored.map(lambda stored: gathered_prompts(stored[layer], pages_1P, tokens))
        return (found.keys, found.values) if self.quantiser is None else self.quantiser.decode(layer, found, self.shape.dtype)

    def assign(self, pages: dict[int, list[int]]) -> None:
        """Let slots read the prompts in these pages, by slot."""
        rows = [[*of_slot, *[0] * (self.pages_SP.shape[1] - len(of_slot))] for of_slot in pages.values()]
        device = self.pages_SP.device
        self.pages_SP[torch.tensor(list(pages), device=device)] = torch.tensor(rows, dtype=torch.int32, device=device)

    def prompts_before(self, own_RHTx: Tensor, number: int, layer_R: Tensor, slot_R: Tensor, tokens: int) -> Tensor:
        """Return a copy of `own` after the first `tokens` tokens of each slot's prompt. `number` is that of a tensor of
        `stored`."""
        pages_RP = self.pages_SP[slot_R].long() + layer_R[:, None] * self.pages
        return torch.cat([gathered_prompts(self.stored[number].flatten(0, 1), pages_RP, tokens), own_RHTx], dim=2)


@dataclass(frozen=True)
class PackedPages:
    """Page, and index within the page, of every token of packed prompts, in the order of the packed tokens."""

    pages_M: Tensor
    places_M: Tensor

    @classmethod
    def of(cls, prompts: list[tuple[int, list[int]]], device: torch.device) -> "PackedPages":
        """Build from (number of tokens, pages) of each prompt."""
        pages = torch.tensor([page for tokens, pages in prompts for page in pages], device=device)
        counts = [min(PAGE_TOKENS, tokens - first) for tokens, _ in prompts for first in range(0, tokens, PAGE_TOKENS)]
        total = sum(counts)
        counts_n = torch.tensor(counts, device=device)
        which_M = torch.repeat_interleave(torch.arange(len(counts), device=device), counts_n, output_size=total)
        places_M = torch.arange(total, device=device) - (counts_n.cumsum(0) - counts_n)[which_M]
        return cls(pages[which_M], places_M)


class PagePool:
    """Assignment of pages to groups. It runs on the host and uses plain integers."""

    def __init__(self, pages: int):
        self.pages = pages
        self.peak = 0
        """Most pages in use at once."""
        self.taken = 0
        """Pages taken so far, over all groups."""
        self.free = list(range(pages))
        self.of_group: dict[int, list[int]] = {}
        """Pages of each group."""
        self.samples_left: dict[int, int] = {}
        """Samples of each group that have not ended, including those that wait for a slot."""

    @property
    def used(self) -> int:
        return self.pages - len(self.free)

    def take(self, group: int, tokens: int, samples: int) -> bool:
        """Assign pages to a group. Return False if too few are free."""
        count = pages_of(tokens)
        if count > len(self.free):
            return False
        self.of_group[group], self.free = self.free[:count], self.free[count:]
        self.samples_left[group] = samples
        self.taken += count
        self.peak = max(self.peak, self.used)
        return True

    def end_sample(self, group: int) -> None:
        """Count one ended sample of a group. Its last sample frees the pages."""
        self.samples_left[group] -= 1
        if not self.samples_left[group]:
            self.free += self.of_group.pop(group)
            del self.samples_left[group]

    @property
    def straggler_pages(self) -> int:
        """Pages of the groups of which one sample is left."""
        return sum(len(self.of_group[group]) for group, left in self.samples_left.items() if left == 1)
