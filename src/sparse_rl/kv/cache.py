"""The slot cache: one tensor of keys and one of values for all layers and slots, with a fixed size.

A slot holds one running sequence. Every layer and head of a slot holds the same number of tokens, in time order, at the start
of its row. If prompts are protected, a `PromptStore` holds them, and slots hold response tokens only. A `WindowStore` holds the
sliding-window layers, and a `StateStore` the states of recurrent layers; the cache's layer indices skip both. The host computes
every length from the fixed schedule, so this module never synchronizes with the device.
"""

# L layers, S slots, H kv heads, Q query heads, C capacity, D head dimension, W window, T tokens held, K tokens kept, R rows of
# a tile ((layer, slot) pairs that are compacted together), P prompts, m prompts with an n-th sample

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..format import counted
from ..kernels.counter_rng import mix
from ..kernels.gather import dropped_positions, keep_in_place
from ..kernels.jit import usable
from ..kernels.redundancy import TILE_ROWS
from ..kernels.rows import Rows
from ..sizes import SCRATCH_FLOOR_BYTES, SCRATCH_SHARE, token_bytes
from .policies import Policy
from .prompt_layout import NthSamples, PackedPrompts
from .prompt_store import PromptStore
from .shape import CacheShape, refuse_too_large
from .states import StateStore
from .statistics import Statistics
from .storage import KEY_STEPS, KEYS, VALUE_STEPS, VALUES, Quantiser, Stored, allocated, encoded
from .windows import WindowStore

STATISTICS_FORMS = 5
"""float32 tensors of the size of the keys that a policy with statistics allocates: keys, pairs, complex numbers and products."""
RANKING_BYTES = 10 * 8
"""Scratch bytes of ranking per token and kv head: about ten numbers of eight bytes."""
LOGIT_BYTES = 2 * 4
"""Scratch bytes of scores per token and query head: two float32 numbers."""
SIMILARITY_BYTES = 10
"""Scratch bytes of R-KV without kernels per pair of tokens in a tile: a float32 similarity, its comparisons and their copies."""
CODE_BYTES = 2
"""Scratch bytes of decoding without kernels per number, besides float32 forms: its code, packed and unpacked."""


class SlotCache:
    def __init__(
        self,
        model_shape: CacheShape,
        slots: int,
        capacity: int,
        ring: int = 0,
        first_layer: int = 0,
        quantiser: Quantiser | None = None,
    ):
        self.layers = model_shape.full_layers
        """Layers of the model that the cache holds."""
        self.index_of_layer = model_shape.index_of_layer
        """Index in the cache of each layer of the model that it holds."""
        self.sources = model_shape.sources
        """Map from each layer without keys to the layer whose keys it reads."""
        self.windows: WindowStore | None = None
        """Cache of the model's sliding-window layers; None until the longest sequence is known, or if there are none."""
        self.states = StateStore(model_shape, slots) if model_shape.states else None
        """States of the model's recurrent layers; None if it has none."""
        self.absent = tuple(layer for layer in range(model_shape.layers) if layer not in self.index_of_layer)
        """Layers of the model that the cache does not hold: they have a window, no attention or no keys."""
        shape = self.shape = model_shape.full
        self.slots, self.capacity, self.ring = slots, capacity, ring
        self.numbers_L = torch.tensor(self.layers, device=shape.device) + first_layer
        """Layer indices in the model, from which policies derive random numbers."""
        self.quantiser = quantiser
        """Storage in 8 or 4 bits, with scales on the cache's device; None for the model's dtype."""
        self.statistics: Statistics = {}
        """Statistics that a policy with `uses_statistics` reads, of the cache's layers and on its device."""
        self.prompts: PromptStore | None = None
        """Store of the prompts that the slots read; None if the slots hold their prompts."""
        name = f"The KV cache of {counted(slots, 'slot')} of {capacity:,} tokens"
        refuse_too_large(
            shape, slots * capacity * self.token_bytes, name, "lower kv.budget or max_tokens, or the number of slots"
        )
        rows = (shape.layers, slots, shape.kv_heads, capacity)
        ring_rows = (shape.layers, slots, shape.q_heads, ring)
        # Zeros instead of uninitialized memory: a masked key has weight 0, and 0 times an uninitialized NaN is NaN.
        self.stored = allocated(rows, shape, quantiser)
        self.positions_LSHC = torch.zeros(rows, dtype=torch.int32, device=shape.device)
        self.lengths_S = torch.zeros(slots, dtype=torch.int64, device=shape.device)
        self.queries_LSQWD = torch.zeros(*ring_rows, shape.head_dim, dtype=shape.dtype, device=shape.device)

    @property
    def keys_LSHCD(self) -> Tensor:
        """Keys, or their codes; 4-bit codes are two to a byte."""
        return self.stored.keys

    @property
    def values_LSHCD(self) -> Tensor:
        return self.stored.values

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, summed over all layers."""
        return token_bytes(self.shape, self.shape.dtype.itemsize, "auto" if self.quantiser is None else self.quantiser.dtype)

    @property
    def dense_token_bytes(self) -> int:
        """Bytes of one token's keys and values in the model's dtype, summed over all layers."""
        return token_bytes(self.shape, self.shape.dtype.itemsize)

    def dense_bytes(self, tokens: int) -> int:
        """Return the bytes of a dense cache of `tokens` tokens in the model's dtype, windows and states included."""
        return tokens * self.dense_token_bytes + self.fixed_bytes

    @property
    def fixed_bytes(self) -> int:
        """Allocated bytes that do not depend on the policy: windows and recurrent states."""
        return (0 if self.windows is None else self.windows.kv_bytes) + (0 if self.states is None else self.states.nbytes)

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer, in the model's dtype."""
        return 2 * self.shape.kv_heads * self.shape.head_dim * self.shape.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Allocated bytes of keys and values, with their steps, the prompt store, the windows and recurrent states."""
        return self.stored.nbytes + (0 if self.prompts is None else self.prompts.kv_bytes) + self.fixed_bytes

    @property
    def has_windows_or_states(self) -> bool:
        """True if slots hold windows or recurrent states, which are not in the pages of a prompt store."""
        return self.windows is not None or self.states is not None

    @property
    def side_bytes(self) -> int:
        """Allocated bytes of positions, lengths, the ring buffer of queries and page tables."""
        tensors = (self.positions_LSHC, self.lengths_S, self.queries_LSQWD)
        slot_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        return slot_bytes + (0 if self.prompts is None else self.prompts.side_bytes)

    def empty_like(self, slots: int, capacity: int) -> "SlotCache":
        """Return an empty cache of the same layers, without a prompt store."""
        cache = SlotCache(self.shape, slots, capacity, self.ring, quantiser=self.quantiser)
        if self.windows is not None:
            cache.windows = WindowStore(self.windows.shape, slots, self.windows.capacity)
        if self.states is not None:
            cache.states = StateStore(self.states.shape, slots)
        return cache

    def clear(self) -> None:
        for tensor in (*self.stored, self.queries_LSQWD, self.positions_LSHC, self.lengths_S):
            tensor.zero_()
        for store in (self.prompts, self.windows, self.states):
            if store is not None:
                store.clear()

    # Writing

    def fill(
        self,
        layer: int,
        samples: list[NthSamples],
        queries_PQTD: Tensor,
        keys_PHTD: Tensor,
        values_PHTD: Tensor,
        budget: int,
        policy: Policy,
    ) -> list[Tensor]:
        """Write prompts of one length into the slots of their samples. Prompts longer than `budget` are compressed to it.

        `queries_PQTD` may hold only the last tokens, as many as the ring buffer holds.
        Return the dropped positions [P, H, T - budget]. The list is empty if the prompts fit. It has one tensor if all samples
        of a prompt drop the same keys. If the policy uses the rollout's seed, it has one tensor per sample number.
        """
        total = keys_PHTD.shape[2]
        places_w = torch.arange(max(0, total - self.ring), total, device=keys_PHTD.device)
        recent_PQwD = queries_PQTD[:, :, -self.ring :] if self.ring else None
        positions_PHT = torch.arange(total, device=keys_PHTD.device).expand(*keys_PHTD.shape[:3])
        whole = encoded(self.quantiser, layer, keys_PHTD, values_PHTD)
        if self.quantiser is not None:
            keys_PHTD = self.quantiser.decode_keys(layer, whole.keys, whole.key_steps, keys_PHTD.dtype)
            values_PHTD = self.quantiser.decode_values(whole.values, whole.value_steps, values_PHTD.dtype)
        new, positions = whole, positions_PHT
        dropped = []
        for number, nth in enumerate(samples):
            if policy.evicts and total > budget and (number == 0 or policy.uses_seeds):
                kept = policy.select(
                    recent_PQwD,
                    keys_PHTD,
                    values_PHTD,
                    budget,
                    seeds=mix(nth.seeds_P, self.numbers_L[layer]),
                    positions=positions_PHT,
                    **self._statistics_of(policy, torch.full_like(nth.seeds_P, layer)),
                )
                new, positions = whole.map(partial(_gather, kept_BHK=kept)), kept
                dropped.append(dropped_positions(positions_PHT, kept))
            held, rows_m, slots_m = positions.shape[2], nth.rows_m, nth.slots_m
            for stored, each in zip(self.stored, new, strict=True):
                stored[layer, slots_m, :, :held] = each[rows_m]
            self.positions_LSHC[layer, slots_m, :, :held] = positions[rows_m].to(torch.int32)
            self.lengths_S[slots_m] = held
            if recent_PQwD is not None:
                self.queries_LSQWD[layer, slots_m[:, None], :, places_w % self.ring] = recent_PQwD[rows_m].transpose(1, 2)
        return dropped

    def fill_packed(self, layer: int, packed: PackedPrompts, new_1HNx: Stored) -> None:
        """Write prompts that need no compression into the slots of their samples, for one layer."""
        for stored, new in zip(self.stored, new_1HNx, strict=True):
            stored[layer, packed.slots_M, :, packed.places_M] = new[0, :, packed.source_M].transpose(0, 1)

    def fill_ring(self, layer: int, packed: PackedPrompts, queries_1QND: Tensor) -> None:
        """Write the last queries of prompts into the ring buffers of their samples' slots, for one layer."""
        if self.ring:
            source_m, slots_m, places_m = packed.recent
            self.queries_LSQWD[layer, slots_m, :, places_m] = queries_1QND[0, :, source_m].transpose(0, 1)

    def place_packed(self, packed: PackedPrompts) -> None:
        """Write the positions and lengths of packed prompts. Call it after all layers are filled."""
        slots, tokens = (torch.tensor(each, device=self.lengths_S.device) for each in zip(*packed.lengths, strict=True))
        if self.prompts is None:
            self.positions_LSHC[:, packed.slots_M, :, packed.places_M] = packed.places_M[:, None, None].to(torch.int32)
            self.lengths_S[slots] = tokens
        else:
            self.lengths_S[slots] = 0

    def append(self, layer: int, rows: Tensor, keys_SHD: Tensor, values_SHD: Tensor) -> None:
        """Write one new token of each slot, for one layer. Call `advance` after all layers have stored the token."""
        lengths = self.lengths_S[rows]
        new = encoded(self.quantiser, layer, keys_SHD[:, :, None], values_SHD[:, :, None])
        for stored, each in zip(self.stored, new, strict=True):
            stored[layer, rows, :, lengths] = each.squeeze(2)

    def append_queries(self, layer: int, rows: Tensor, queries_SQD: Tensor, positions_S: Tensor) -> None:
        if self.ring:
            self.queries_LSQWD[layer, rows, :, positions_S % self.ring] = queries_SQD

    def advance(self, rows: Tensor, positions_S: Tensor) -> None:
        self.positions_LSHC[:, rows, :, self.lengths_S[rows]] = positions_S[:, None, None].to(torch.int32)
        self.lengths_S[rows] += 1

    def copy_slot(self, source: "SlotCache", source_slot: int, slot: int, held: int) -> None:
        """Copy a sequence from another slot, of this cache or another one."""
        for mine, theirs in zip(self.stored, source.stored, strict=True):
            mine[:, slot, :, :held] = theirs[:, source_slot, :, :held]
        self.positions_LSHC[:, slot, :, :held] = source.positions_LSHC[:, source_slot, :, :held]
        self.queries_LSQWD[:, slot] = source.queries_LSQWD[:, source_slot]
        self.lengths_S[slot] = held
        if self.prompts is not None and source.prompts is not None:
            self.prompts.pages_SP[slot] = source.prompts.pages_SP[source_slot]
        self.copy_windows_and_states(source, source_slot, slot)

    def copy_windows_and_states(self, source: "SlotCache", source_slot: int, slot: int) -> None:
        """Copy only the windows and recurrent states of a sequence from another slot, of this cache or another one."""
        if self.windows is not None and source.windows is not None:
            self.windows.copy_slot(source.windows, source_slot, slot)
        if self.states is not None and source.states is not None:
            self.states.copy_slot(source.states, source_slot, slot)

    def reorder(self, slots: Tensor) -> None:
        """Move the content of slot `slots[i]` to slot i, for beam search."""
        assert self.states is None, "beam search does not support recurrent layers"
        for tensor in (*self.stored, self.positions_LSHC, self.queries_LSQWD):
            tensor.copy_(tensor[:, slots])
        self.lengths_S.copy_(self.lengths_S[slots])
        if self.windows is not None:
            self.windows.reorder(slots)

    # Reading

    def read(self, layer: int, slots: slice, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [S, H, T, D] of the first tokens of these slots, as attention reads them."""
        found = self.stored.map(lambda tensor: tensor[layer, slots, :, :tokens])
        return (found.keys, found.values) if self.quantiser is None else self.quantiser.decode(layer, found, self.shape.dtype)

    # Compaction

    def compact(
        self,
        slots: list[int],
        held: int,
        budget: int,
        policy: Policy,
        *,
        ends: list[int],
        seeds: list[int],
        protected: int = 0,
    ) -> Tensor:
        """Keep `budget` of the `held` tokens of these slots, in place. Return the dropped positions [L, n, H, held - budget].

        `ends` are the positions of the slots' next tokens, which give the start of each ring buffer. `seeds` has one entry per
        slot. `protected` is the number of leading tokens of the sequences that are always kept. With a prompt store these are
        the stored prompts. `held` and `budget` do not count them, but a policy that compares keys sees them before the slot's
        own tokens. Rows are compacted in tiles, so that scratch memory does not grow with the number of slots.
        """
        device = self.shape.device
        slots_n = torch.tensor(slots, device=device)
        ends_n = torch.tensor(ends, device=device)
        seeds_n = torch.tensor(seeds, device=device)
        self.lengths_S[slots_n] = budget
        if not self.layers:  # every layer has a window
            return torch.empty(0, len(slots), self.shape.kv_heads, held - budget, dtype=torch.int32, device=device)
        if self.prompts is not None and not policy.compares_keys:  # it scores only the slot's own tokens
            policy = policy.after(protected)
            protected = 0
        stored = 0 if self.prompts is None else protected
        protected_n = torch.full((len(slots),), protected, device=device)
        dropped = []
        in_place = policy.reads_rows and usable(device) and not stored and self.quantiser is None
        copies = (not in_place) + policy.uses_values + (stored > 0)
        if policy.uses_statistics and not (policy.reads_rows and usable(device)):
            copies += STATISTICS_FORMS * torch.float32.itemsize // self.shape.dtype.itemsize
        for layer_R, which_R in self._tiles(len(slots), stored + held, copies=copies):
            slot_R = slots_n[which_R]
            rows_R = layer_R * self.slots + slot_R
            more: dict[str, Any] = {"protected": protected_n[which_R]} if protected else {}  # some policies do not accept it
            kept_RHK: Tensor = policy.select(
                self.ring_in_order(layer_R, slot_R, ends_n[which_R]) if self.ring else None,
                Rows(_rows(self.keys_LSHCD), rows_R, held) if in_place else self._take_keys(layer_R, slot_R, held, stored),
                self._take_values(layer_R, slot_R, held, stored) if policy.uses_values else None,
                stored + budget,
                seeds=mix(seeds_n[which_R], self.numbers_L[layer_R]) if policy.uses_seeds else None,
                positions=_after_prompt(_rows(self.positions_LSHC)[rows_R, :, :held], stored),
                **self._statistics_of(policy, layer_R),
                **more,
            )
            if stored:  # the store keeps the whole prompt
                kept_RHK = kept_RHK[..., stored:] - stored
            dropped.append(keep_in_place(*self.stored.map(_rows), _rows(self.positions_LSHC), rows_R, kept_RHK, held))
        return torch.cat(dropped).view(self.shape.layers, len(slots), self.shape.kv_heads, held - budget)

    def _statistics_of(self, policy: Policy, layer_R: Tensor) -> dict[str, Any]:
        """Return the additional arguments of a policy with `uses_statistics`."""
        if not policy.uses_statistics:
            return {}
        return {"layers": layer_R, "statistics": self.statistics}

    def _take_keys(self, layer_R: Tensor, slot_R: Tensor, held: int, stored: int) -> Tensor:
        """Return a copy of the keys of these slots: `stored` tokens of the prompt store, then `held` of the slot."""
        keys_RHTD, steps_RHTG = (self._take(number, layer_R, slot_R, held, stored) for number in (KEYS, KEY_STEPS))
        if self.quantiser is None:
            return keys_RHTD  # type: ignore[return-value]
        return self.quantiser.decode_keys(layer_R, keys_RHTD, steps_RHTG, self.shape.dtype)

    def _take_values(self, layer_R: Tensor, slot_R: Tensor, held: int, stored: int) -> Tensor:
        values_RHTD, steps_RHTG = (self._take(number, layer_R, slot_R, held, stored) for number in (VALUES, VALUE_STEPS))
        if self.quantiser is None:
            return values_RHTD  # type: ignore[return-value]
        return self.quantiser.decode_values(values_RHTD, steps_RHTG, self.shape.dtype)

    def _take(self, number: int, layer_R: Tensor, slot_R: Tensor, held: int, stored: int) -> Tensor | Rows:
        """Return a copy of these rows, or a reference if kernels decode them in place."""
        if self.quantiser is not None and usable(self.shape.device) and not stored:
            return Rows(_rows(self.stored[number]), layer_R * self.slots + slot_R, held)
        own_RHTx = self.stored[number][layer_R, slot_R, :, :held]
        return own_RHTx if self.prompts is None else self.prompts.prompts_before(own_RHTx, number, layer_R, slot_R, stored)

    def _tiles(self, slots: int, held: int, *, copies: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (layer, slot index) of the rows of each tile, layer by layer. Scratch memory limits the rows of a tile."""
        share = SCRATCH_SHARE * self.dense_token_bytes / max(1, self.token_bytes)  # codes are decoded to the model's dtype
        size = self.kv_bytes - self.fixed_bytes
        rows = max(1, int(max(share * size, SCRATCH_FLOOR_BYTES) / self._row_scratch_bytes(held, copies)))
        pairs = torch.arange(self.shape.layers * slots, device=self.keys_LSHCD.device)
        for tile in pairs.split(rows):
            yield tile // slots, tile % slots

    def _row_scratch_bytes(self, held: int, copies: int) -> int:
        """Return the scratch bytes that compacting one row needs.

        These are two copies of the window's queries. With kernels, they are also copies of keys and values if the policy needs
        them, numbers for ranking, and scores of every query head. Without kernels, they are also copies of keys, values and kept
        tokens, three float32 forms of the keys, three more to decode codes, and a tile of R-KV's similarities. R-KV needs the
        most memory of all policies.
        """
        shape = self.shape
        window_bytes = 2 * shape.q_heads * self.ring * shape.head_dim * shape.dtype.itemsize
        key_bytes = held * shape.head_dim * shape.dtype.itemsize
        if usable(shape.device):
            head_bytes = copies * key_bytes + RANKING_BYTES * held
            return window_bytes + shape.kv_heads * head_bytes + shape.q_heads * LOGIT_BYTES * held
        float_bytes = 3 * held * shape.head_dim * torch.float32.itemsize
        if self.quantiser is not None:
            key_bytes += held * shape.head_dim * CODE_BYTES + float_bytes
        similarity_bytes = min(held, TILE_ROWS) * held * SIMILARITY_BYTES
        return window_bytes + shape.kv_heads * (3 * key_bytes + float_bytes + similarity_bytes)

    def ring_in_order(self, layer_R: Tensor, slot_R: Tensor, ends_R: Tensor) -> Tensor:
        """Return the queries of the window [R, Q, W, D], oldest first."""
        step_W = torch.arange(self.ring, device=ends_R.device)
        places_RW = (ends_R[:, None] + step_W) % self.ring
        return self.queries_LSQWD[layer_R[:, None], slot_R[:, None], :, places_RW].transpose(1, 2)


def _rows(tensor_LSx: Tensor) -> Tensor:
    """Flatten layers and slots into one dimension."""
    return tensor_LSx.flatten(0, 1)


def _after_prompt(positions_RHT: Tensor, stored: int) -> Tensor:
    """Prepend the positions 0 to `stored` - 1."""
    prompt_t = torch.arange(stored, dtype=positions_RHT.dtype, device=positions_RHT.device)
    return torch.cat([prompt_t.expand(*positions_RHT.shape[:2], -1), positions_RHT], dim=2) if stored else positions_RHT


def _gather(tensor_BHTD: Tensor, kept_BHK: Tensor) -> Tensor:
    return tensor_BHTD.gather(2, kept_BHK[..., None].expand(-1, -1, -1, tensor_BHTD.shape[-1]))
