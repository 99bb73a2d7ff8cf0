"""`BoundedCache`: the eviction policies of sparse-rl for `model.generate` in transformers.

    model.set_attn_implementation("sparse_rl")
    model.generate(**inputs, past_key_values=BoundedCache(policy="rkv", budget=512))

`BoundedCache.from_pretrained(path)` uses the settings with which sparse-rl trained the model.

The schedule is that of the engine: a prompt is compressed to the budget, and the cache is compressed to the budget after every
`interval` new tokens. With `protect_prompt`, prompts are never evicted and the budget counts new tokens; each row holds its own
copy of its prompt. With `dtype` 8bit or 4bit, keys and values are stored as the engine stores them; without statistics of the
model, the first prompts give the scales. With policy full and 8bit or 4bit, nothing is evicted, and the cache grows page by page.
Sliding-window layers hold their window in the model's dtype, and recurrent layers the states that transformers gives them. In
a left-padded batch, padding is never attended to, so the sinks are the first real tokens.
"""

# B rows of the batch, Q query heads, H kv heads, T new tokens, D head dimension

import functools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from ..config import KV
from ..errors import UserError
from ..format import agreeing, counted
from ..kernels.attention import causal_attention, decode_attention
from ..kernels.counter_rng import derive
from ..kernels.form import PLAIN, AttentionForm
from ..kernels.jit import on
from ..kv.cache import SlotCache
from ..kv.policies import Policy, from_settings
from ..kv.prompt_layout import nth_samples
from ..kv.quantize import Range, channel_range
from ..kv.schedule import DENSE, Schedule, by_length
from ..kv.shape import CacheShape
from ..kv.statistics import KEY_SCALES, Statistics, key_scales
from ..kv.storage import KeyScales, Quantiser
from ..kv.windows import WindowStore
from ..models.attention import BoundKeys
from ..models.stored_kv import stored_kv
from ..models.stored_statistics import stored_statistics
from ..sizes import PAGE_TOKENS, pages_of


class BoundedCache(Cache):
    """A transformers cache that holds at most budget + interval tokens per attention layer, head and row after prefill, plus
    protected prompts. With policy full, which needs dtype 8bit or 4bit, it holds all tokens.

    Two defaults differ from those of `KV`. `policy` is rkv, because triattention needs statistics of the model. `protect_prompt`
    is false: every row would hold its own copy of the prompt, so the memory would not be bounded, and a protected prompt must
    come in one pass.
    """

    def __init__(
        self,
        policy: str = "rkv",
        budget: int = 512,
        *,
        interval: int = 128,
        window: int | Literal["auto"] = "auto",
        sinks: int = 4,
        protect_prompt: bool = False,
        dtype: Literal["auto", "8bit", "4bit"] = "auto",
        options: dict[str, Any] | None = None,
        seed: int = 0,
        statistics: Statistics | None = None,
    ):
        self.kv = KV(
            policy=policy,
            budget=budget,
            interval=interval,
            window=window,
            sinks=sinks,
            protect_prompt=protect_prompt,
            dtype=dtype,
            options=options or {},
        )
        self.kv.capacity  # noqa: B018 - refuse auto here, not in the model's first pass
        if not self.kv.is_sparse:
            raise UserError("BoundedCache does not support policy='full' with dtype='auto': use transformers' DynamicCache.")
        chosen, statistics = from_settings(self.kv), statistics or {}
        if not statistics.keys() >= set(chosen.uses_statistics):
            raise UserError(
                f"Policy {policy} needs statistics of the model: pass statistics=engine.statistics of an Engine with this policy "
                "that has sampled, or use another policy, such as rkv."
            )
        super().__init__(layer_class_to_replicate=partial(BoundedLayer, self.kv, chosen, seed, statistics))
        self.continues = False
        """True if the current pass continues earlier ones."""
        self.statistics, self.checked = statistics, False

    @classmethod
    def from_pretrained(cls, path: str | Path, *, seed: int = 0) -> "BoundedCache":
        """Return a cache with the settings in sparse_rl.json, which is stored next to a model's weights in a folder or on the
        hub."""
        stored, remedy = stored_kv(str(path)), "pass KV settings explicitly, as in BoundedCache('rkv', budget=512)"
        if not stored:
            raise UserError(f"{path} has no KV settings (no sparse_rl.json): {remedy}.")
        kv = KV(**stored)
        if not kv.is_sparse:
            raise UserError(f"{path} was trained with a dense cache: use transformers' DynamicCache, or {remedy}.")
        return cls(
            kv.policy,
            kv.kept_tokens,
            interval=kv.interval,
            window=kv.window,
            sinks=kv.sinks,
            protect_prompt=kv.protect_prompt,
            dtype=kv.dtype,
            options=kv.options,
            seed=seed,
            statistics=stored_statistics(str(path)),
        )

    def _layer(self, layer_idx: int, state_idx: int = 0) -> "BoundedLayer":
        if state_idx > 0:
            raise UserError("BoundedCache supports one state per recurrent layer: use transformers' DynamicCache.")
        while len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate(layer=len(self.layers)))
        return self.layers[layer_idx]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self._layer(layer_idx)
        if layer.is_initialized and not self.checked:
            self._check_statistics()
        layer.place = sum(earlier.cache is not None for earlier in self.layers[:layer_idx])
        bound = BoundKeys(layer, layer_idx, key_states, value_states)
        return bound, bound

    def _check_statistics(self) -> None:
        """Raise if the statistics are of another number of layers than the first pass has found."""
        self.checked = True
        given = {len(tensor) for tensor in self.statistics.values()}
        layers = sum(layer.cache is not None for layer in self.layers)
        if given - {layers}:
            raise UserError(
                f"The statistics are of {counted(max(given), 'layer')}, but {layers} of the model "
                f"{agreeing(layers, 'attends', 'attend')} to all tokens: gather them again with an Engine "
                "(engine.calibrate), or omit statistics."
            )

    def get_conv_state(self, layer_idx, state_idx=0):
        self._layer(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        self._layer(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def has_previous_state(self, layer_idx=None, state_idx=None):
        # OLMo-Hybrid in transformers 5.17 names no layer, and asks before all layers are made
        return self.continues if layer_idx is None else super().has_previous_state(layer_idx, state_idx)

    def get_seq_length(self, layer_idx=0):
        """Return the number of batch columns so far in this layer, or in the next one with attention."""
        return next((layer.seen for layer in self.layers[layer_idx:] if layer.is_initialized), 0)

    def get_mask_sizes(self, query_length, layer_idx):
        seen = self.get_seq_length(layer_idx)
        if not query_length:  # `generate` drops the tokens that the cache has seen
            raise UserError(f"The cache already holds {seen} tokens of another call: use a new BoundedCache, or call reset().")
        self.continues = seen > 0  # a pass builds its masks before it runs its layers
        return seen + query_length, 0

    def reset(self):
        """Drop all content. The next batch may have another number of rows."""
        self.layers.clear()
        self.continues = False

    @property
    def kv_bytes(self) -> int:
        """Allocated bytes of keys and values, and of recurrent states."""
        return sum(layer.nbytes for layer in self.layers)

    def crop(self, *args, **kwargs):
        raise UserError("BoundedCache does not support crop: disable assisted decoding.")

    def batch_repeat_interleave(self, repeats: int):
        raise UserError(
            "BoundedCache does not support batch_repeat_interleave: pass num_return_sequences, which repeats prompts "
            "before prefill."
        )

    def batch_select_indices(self, indices: Tensor):
        raise UserError("BoundedCache does not support batch_select_indices: use greedy search, sampling or beam search.")


class BoundedLayer(LinearAttentionLayer):
    """One layer of a `BoundedCache`: the keys and values of attention, recurrent states as transformers holds them, or both. It
    is also the attention view of its own keys: our attention function passes them back together with the queries."""

    is_sliding = is_compileable = is_croppable = False

    def __init__(self, kv: KV, policy: Policy, seed: int, statistics: Statistics, layer: int):
        super().__init__()
        self.kv, self.policy, self.seed, self.statistics, self.layer = kv, policy, seed, statistics, layer
        self.place = layer
        """Index of the layer in the statistics, which count only layers that attend to all tokens."""
        self.is_initialized = False
        """True if the layer holds keys."""
        self.schedule = Schedule.of(kv, policy.evicts) if policy.evicts else DENSE
        self.protects = kv.protect_prompt and policy.evicts
        """True if prompts are protected from eviction."""
        self.cache: SlotCache | None = None
        self.windows: WindowStore | None = None
        """Cache of a sliding-window layer, which has no `cache`."""
        self.seen = 0
        """Number of batch columns so far, including padding."""
        self.entered = 0
        """Number of tokens after the prompt."""
        self.prompts: list[int] = []
        """Number of real tokens in each row's prompt."""
        self.held: list[int] = []

    def attend(self, layer, queries_BQTD, keys_BHTD, values_BHTD, scale, mask, form=PLAIN):
        new = queries_BQTD.shape[2]
        real_BT = None  # new tokens that see themselves are no padding
        if mask is not None:
            real_BT = mask[:, 0].diagonal(mask.shape[-1] - new, dim1=-2, dim2=-1)
        if not self.is_initialized:
            out_BQTD = self._prefill(queries_BQTD, keys_BHTD, values_BHTD, scale, real_BT, form)
        else:
            if real_BT is not None and not bool(real_BT.all()):
                raise UserError(
                    "BoundedCache supports padding only on the left of the first prompt: remove later padding, or call reset() "
                    "before another prompt."
                )
            if self.protects and new > 1:
                raise UserError(
                    "BoundedCache with protect_prompt takes the whole prompt in one pass, then one token at a time: omit "
                    "prefill_chunk_size."
                )
            step = self._step if self.windows is None else self._step_in_window
            steps = [step(queries_BQTD[:, :, t], keys_BHTD[:, :, t], values_BHTD[:, :, t], scale, form) for t in range(new)]
            out_BQTD = torch.stack(steps, dim=2)
        self.seen += new
        return out_BQTD

    def _prefill(
        self,
        queries_BQTD: Tensor,
        keys_BHTD: Tensor,
        values_BHTD: Tensor,
        scale: float,
        real_BT: Tensor | None,
        form: AttentionForm,
    ) -> Tensor:
        rows, q_heads, total, dim = queries_BQTD.shape
        counts = [total] * rows if real_BT is None else real_BT.sum(dim=-1).tolist()
        if real_BT is not None and not bool((real_BT.long().diff(dim=-1) >= 0).all()):
            raise UserError("BoundedCache supports only left padding: set tokenizer.padding_side = 'left'.")
        if min(counts) == 0:
            raise UserError("The first prefill chunk of a prompt is all padding: omit prefill_chunk_size, or pad less.")
        shape = CacheShape(1, q_heads, keys_BHTD.shape[1], dim, keys_BHTD.dtype, keys_BHTD.device)
        ring = self.policy.window if self.policy.uses_queries else 0
        prompts = [
            tuple(tensor[row : row + 1, :, total - count :] for tensor in (queries_BQTD, keys_BHTD, values_BHTD))
            for row, count in enumerate(counts)
        ]
        self.prompts = counts
        self.is_initialized = True
        if form.window is not None:
            self.windows = WindowStore(replace(shape, window=form.window, windowed=(0,)), rows, form.window)
            out_BQTD = torch.zeros_like(queries_BQTD)
            for row, (count, (q, k, v)) in enumerate(zip(counts, prompts, strict=True)):
                out_BQTD[row, :, total - count :] = causal_attention(q, k, v, scale=scale, form=form)[0]
                self.windows.extend(0, row, 0, k, v)
            return out_BQTD
        quantiser = self._quantiser([k for _, k, _ in prompts], form) if self.kv.quantised else None
        longest = max(counts)
        capacity = self._protected(longest) + self.kv.capacity if self.policy.evicts else pages_of(longest + 1) * PAGE_TOKENS
        self.cache = SlotCache(shape, rows, capacity, ring, first_layer=self.layer, quantiser=quantiser)
        self.cache.statistics = self._of_layer(self.policy.uses_statistics, shape.device)
        out_BQTD = torch.zeros_like(queries_BQTD)
        for row, (count, (q, k, v)) in enumerate(zip(counts, prompts, strict=True)):
            stored = (k, v) if quantiser is None else quantiser.restored(0, k, v)
            out_BQTD[row, :, total - count :] = causal_attention(q, *stored, scale=scale, form=form)[0]
            place = nth_samples([[row]], [[derive(self.seed, row)]], shape.device)
            self.cache.fill(0, place, q, k, v, self._protected(count) + self.kv.kept_tokens, self.policy)
        self.held = [self._protected(count) + self.schedule.held_after_prefill(count) for count in counts]
        return out_BQTD

    def _quantiser(self, keys: list[Tensor], form: AttentionForm) -> Quantiser:
        """Return the storage in 8 or 4 bits. Without statistics of the model, the keys of the prompts give the scales."""
        if self.statistics.keys() >= set(KEY_SCALES):
            scales = key_scales(self._of_layer(KEY_SCALES, keys[0].device))
        else:
            scales = KeyScales.of([functools.reduce(Range.union, map(channel_range, keys))])
        return Quantiser(self.kv.dtype, scales, with_centre=not form.is_plain)

    def _of_layer(self, names: Iterable[str], device: torch.device) -> Statistics:
        """Return the statistics of this layer, as if it were the only one."""
        return {name: self.statistics[name][self.place : self.place + 1].to(device) for name in names}

    def _protected(self, prompt_tokens: int) -> int:
        """Return the tokens of a prompt that are never evicted. The schedule does not count them."""
        return prompt_tokens if self.protects else 0

    def _step_in_window(
        self, queries_BQD: Tensor, keys_BHD: Tensor, values_BHD: Tensor, scale: float, form: AttentionForm
    ) -> Tensor:
        windows = self.windows
        assert windows is not None
        positions_B = torch.tensor(self.prompts, device=keys_BHD.device) + self.entered
        windows.append(0, positions_B, keys_BHD, values_BHD)
        self.entered += 1
        lengths_B = (positions_B + 1).clamp(max=windows.capacity)
        longest, shortest = (min(each(self.prompts) + self.entered, windows.capacity) for each in (max, min))
        rings = windows.read(0, len(positions_B))
        return decode_attention(
            queries_BQD, *rings, lengths_B, longest=longest, even=longest == shortest, scale=scale, form=form
        )

    def _grow(self) -> None:
        """Add a page to each row of a dense cache. Attention reads the whole cache for every token, so a copy per page adds
        little."""
        full = self.cache
        assert full is not None
        self.cache = full.empty_like(full.slots, full.capacity + PAGE_TOKENS)
        for row, held in enumerate(self.held):
            self.cache.copy_slot(full, row, row, held)

    def _step(self, queries_BQD: Tensor, keys_BHD: Tensor, values_BHD: Tensor, scale: float, form: AttentionForm) -> Tensor:
        if not self.policy.evicts and self.cache is not None and max(self.held) == self.cache.capacity:
            self._grow()
        cache = self.cache
        assert cache is not None
        rows = torch.arange(len(self.held), device=keys_BHD.device)
        positions_B = torch.tensor(self.prompts, device=keys_BHD.device) + self.entered
        cache.append(0, rows, keys_BHD, values_BHD)
        cache.append_queries(0, rows, queries_BQD, positions_B)
        cache.advance(rows, positions_B)
        self.held = [held + 1 for held in self.held]
        out_BQD = decode_attention(
            queries_BQD,
            *cache.read(0, slice(None), max(self.held)),
            cache.lengths_S,
            longest=max(self.held),
            even=max(self.held) == min(self.held),
            scale=scale,
            form=form,
        )
        self.entered += 1
        self._compact()
        return out_BQD

    def _compact(self) -> None:
        assert self.cache is not None
        lengths = [(row, self._protected(self.prompts[row]), held) for row, held in enumerate(self.held)]
        due = [each for each in lengths if self.schedule.is_due(self.entered, each[2] - each[1])]
        for (protected, held), rows in by_length(due).items():
            ends = [self.prompts[row] + self.entered for row in rows]
            seeds = [derive(self.seed, row) for row in rows]
            kept = protected + self.kv.kept_tokens
            with on(self.cache.shape.device):
                self.cache.compact(rows, held, kept, self.policy, ends=ends, seeds=seeds, protected=protected)
            for row in rows:
                self.held[row] = kept

    @property
    def nbytes(self) -> int:
        """Allocated bytes of keys and values, and of recurrent states."""
        stores = sum(store.kv_bytes for store in (self.cache, self.windows) if store is not None)
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        return stores + sum(state.nbytes for state in states if state is not None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for store in (self.cache, self.windows):
            if store is not None:
                store.reorder(beam_idx)
        self.held, self.prompts = ([each[row] for row in beam_idx.tolist() if each] for each in (self.held, self.prompts))
