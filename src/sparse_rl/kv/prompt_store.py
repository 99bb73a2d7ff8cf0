"""The prompt store: keys and values of prompts, held once per group and read by the slots of all its samples.

The store is a fixed pool of pages. A group takes pages for its prompt when it is admitted, and returns them when its last
sample has ended. In a dense cache, a sequence also takes pages for its response (`pages.py`). `PagePool` assigns pages on the
host. `PromptStore` holds the tensors and one page table per slot.
"""

# L layers, S slots, H kv heads, N pages of the pool, T tokens of a page, D head dimension, P pages of the longest prompt, M
# written tokens, R prompts, or rows of a tile ((layer, slot) pairs that are compacted together)

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ..format import counted
from ..kernels.rows import gathered_prompts
from ..sizes import PAGE_TOKENS, least_dense_pages, page_table_width, pages_of, reads_prompts_once, token_bytes
from .shape import CacheShape, refuse_too_large
from .storage import Quantiser, Stored, allocated


class PromptStore:
    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        pages: int,
        longest: int,
        quantiser: Quantiser | None = None,
        *,
        responses: bool = False,
    ):
        """Allocate `pages` pages, and page tables for at most `longest` tokens. With `responses`, a slot has pages for a whole
        sequence, not only for the prompt."""
        self.shape, self.slots, self.pages, self.responses = shape, slots, pages, responses
        self.quantiser = quantiser
        self.reads_once = False
        """True if a decode step reads a prompt once for all its slots. Each call of the engine decides."""
        dtype = "auto" if quantiser is None else quantiser.dtype
        needed = pages * PAGE_TOKENS * token_bytes(shape, shape.dtype.itemsize, dtype)
        refuse_too_large(
            shape,
            needed,
            f"The pool of {counted(pages, 'page')} of {PAGE_TOKENS} tokens",
            "use shorter sequences or fewer slots",
        )
        self.stored = allocated((shape.layers, pages, shape.kv_heads, PAGE_TOKENS), shape, quantiser)
        self.pages_SP = torch.zeros(slots, page_table_width(longest), dtype=torch.int32, device=shape.device)

    def choose_reads(self, prompt_lengths: Collection[int], samples: int) -> None:
        """Read prompts once in a call with `samples` responses to each of these prompts, if that is faster."""
        running = min(self.slots, samples * len(prompt_lengths))
        tokens = sum(prompt_lengths) / len(prompt_lengths)
        once = reads_prompts_once(self.shape, self.shape.dtype.itemsize, tokens, running, samples)
        self.reads_once = once and not self.responses

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, or sequence, that the store can hold."""
        return min(self.pages, self.pages_SP.shape[1]) * PAGE_TOKENS

    def longest_prompt(self, max_tokens: int) -> int:
        """Return the tokens of the longest prompt that the store can hold. In a dense cache, a response of `max_tokens` tokens
        must fit, too."""
        if not self.responses:
            return self.longest
        pages = self.pages - least_dense_pages(0, max_tokens)
        return min(pages * PAGE_TOKENS, self.pages_SP.shape[1] * PAGE_TOKENS - max_tokens)

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

    def write(self, layer: int, packed: "PackedPages", new_1HNx: Stored) -> None:
        """Write the keys and values of packed prompts into their pages, for one layer."""
        for stored, new in zip(self.stored, new_1HNx, strict=True):
            stored[layer][packed.pages_M, :, packed.places_M] = new[0].transpose(0, 1)

    def read(self, layer: int, pages_RP: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, H, T, D] of prompts, as attention reads them."""
        if self.quantiser is None:  # there are no steps to gather
            keys, values = (gathered_prompts(each[layer], pages_RP, tokens) for each in self.stored[:2])
            return keys, values
        found = self.stored.map(lambda stored: gathered_prompts(stored[layer], pages_RP, tokens))
        return self.quantiser.decode(layer, found, self.shape.dtype)

    def assign(self, pages: dict[int, list[int]]) -> None:
        """Set the page tables of slots. `pages` maps each slot to its pages."""
        rows = [[*of_slot, *[0] * (self.pages_SP.shape[1] - len(of_slot))] for of_slot in pages.values()]
        device = self.pages_SP.device
        self.pages_SP[torch.tensor(list(pages), device=device)] = torch.tensor(rows, dtype=torch.int32, device=device)

    def prompts_before(self, own_RHTx: Tensor, number: int, layer_R: Tensor, slot_R: Tensor, tokens: int) -> Tensor:
        """Return a copy of `own` after the first `tokens` tokens of each slot's prompt. `number` selects a tensor of `stored`."""
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
    """Assignment of pages to groups and sequences. It runs on the host and uses plain integers."""

    def __init__(self, pages: int, *, responses: bool = False):
        self.pages = pages
        self.responses = responses
        """True if sequences take pages for their responses, too."""
        self.peak = 0
        """Most pages in use at once."""
        self.taken = 0
        """Pages taken so far."""
        self.filled_tokens = 0
        """Tokens written to these pages."""
        self.free = list(range(pages))
        self.of_group: dict[int, list[int]] = {}
        """Pages of each group."""
        self.samples_left: dict[int, int] = {}
        """Samples of each group that have not ended, including those that wait for a slot."""
        self.prefilled: set[int] = set()
        """Groups whose pages hold their prompt."""

    @property
    def used(self) -> int:
        return self.pages - len(self.free)

    def take_group(self, group: int, tokens: int, samples: int) -> None:
        """Assign free pages to a group, for its prompt of `tokens` tokens."""
        self.of_group[group] = self.take_pages(tokens)
        self.samples_left[group] = samples

    def take_pages(self, tokens: int) -> list[int]:
        """Return free pages for `tokens` tokens. The caller returns them with `give_back`."""
        count = pages_of(tokens)
        assert count <= len(self.free)
        pages, self.free = self.free[:count], self.free[count:]
        self.taken += count
        self.filled_tokens += tokens
        self.peak = max(self.peak, self.used)
        return pages

    def give_back(self, pages: list[int]) -> None:
        self.free += pages

    def keep(self, group: int, pages: int) -> None:
        """Free the pages of a group after the first `pages`."""
        self.give_back(self.of_group[group][pages:])
        self.of_group[group] = self.of_group[group][:pages]

    def end_sample(self, group: int) -> None:
        """Count one ended sample of a group. Its last sample frees the pages."""
        self.samples_left[group] -= 1
        if not self.samples_left[group]:
            self.release(group)

    def release(self, group: int) -> None:
        """Free the pages of a group. If some of its samples wait, its prompt is prefilled again."""
        self.give_back(self.of_group.pop(group))
        del self.samples_left[group]
        self.prefilled.discard(group)

    @property
    def straggler_pages(self) -> int:
        """Pages of the groups that have one sample left."""
        return sum(len(self.of_group[group]) for group, left in self.samples_left.items() if left == 1)
