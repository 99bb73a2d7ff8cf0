"""A dense cache in pages: slots hold the newest tokens of their sequences, and the prompt store holds the others.

A sequence starts with the pages of its prompt, which all samples of the group read. The prompt's last page is partly filled, so
each sample copies it to its slot and continues there. That page is free again once all samples have started. When a slot has
filled a page, its oldest tokens move to a new page of the pool, unless the slot has room for all tokens to come. The page table
of a slot lists full pages only, and decoding reads them like a stored prompt. Quantised keys and values move as codes.
"""

# L layers, S slots, H kv heads, C capacity, N pages of the pool, T tokens of a page, D head dimension, n moved pages

from collections.abc import Iterator

import torch
from torch import Tensor

from ..sizes import PAGE_TOKENS, SCRATCH_FLOOR_BYTES, SCRATCH_SHARE
from .cache import SlotCache


def move_full_pages(cache: SlotCache, slots: list[int], columns: list[int], pages: list[int]) -> None:
    """Move the oldest page of tokens of each slot to a page of the pool, and enter that page in the slot's page table. The
    other tokens of the slot move to its start."""
    assert cache.prompts is not None
    slots_n, columns_n, pages_n = (torch.tensor(each, device=cache.shape.device) for each in (slots, columns, pages))
    for stored_lNHTD, own_lSHCD in _tiles(cache, len(slots)):
        stored_lNHTD[:, pages_n] = own_lSHCD[:, slots_n, :, :PAGE_TOKENS]
        own_lSHCD[:, slots_n, :, :PAGE_TOKENS] = own_lSHCD[:, slots_n, :, PAGE_TOKENS : 2 * PAGE_TOKENS]
    cache.prompts.pages_SP[slots_n, columns_n] = pages_n.to(torch.int32)


def copy_last_pages(cache: SlotCache, slots: list[int], pages: list[int]) -> None:
    """Copy a partly filled page to the start of each slot."""
    slots_n, pages_n = (torch.tensor(each, device=cache.shape.device) for each in (slots, pages))
    for stored_lNHTD, own_lSHCD in _tiles(cache, len(slots)):
        own_lSHCD[:, slots_n, :, :PAGE_TOKENS] = stored_lNHTD[:, pages_n]


def _tiles(cache: SlotCache, pages: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (pool, slots) of each stored tensor, for as many layers at a time as scratch memory allows."""
    store = cache.prompts
    assert store is not None
    layer_bytes = pages * PAGE_TOKENS * cache.token_bytes // max(1, 2 * cache.shape.layers)
    layers = max(1, int(max(SCRATCH_SHARE * cache.kv_bytes, SCRATCH_FLOOR_BYTES) / max(1, layer_bytes)))
    for stored_LNHTD, own_LSHCD in zip(store.stored, cache.stored, strict=True):
        yield from zip(stored_LNHTD.split(layers), own_LSHCD.split(layers), strict=True)
