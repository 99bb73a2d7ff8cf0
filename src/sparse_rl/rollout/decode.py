"""The decode step: feed one token of each active slot, attend over its cached keys, and return the next token of each."""

# S active slots, Q query heads, H kv heads, D head dimension, V vocabulary, A programs over stored prompts, M slots of a program

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ..kernels.attention import attention_part, decode_attention, merged_parts, paged_decode_attention, prompt_attention
from ..kernels.code_attention import attend_and_append_codes
from ..kernels.form import PLAIN, AttentionForm
from ..kernels.jit import usable
from ..kernels.rows import StoredCodes, StoredPrompts
from ..kernels.slot_attention import attend_and_append, attend_in_ring, processors_of, splits_for
from ..kv.cache import SlotCache
from ..models.recurrent import Mixer
from ..models.routing import RecordedRouting
from ..sizes import PAGE_TOKENS, pages_of

PROMPT_TOKENS = 1024
"""Assumed length of a stored prompt in the choice of splits. It is fixed, so that results do not depend on earlier calls."""
RESPONSE_TOKENS = 8192
"""Assumed length of a sequence in the pages of a dense cache, likewise."""

NewToken = tuple[Tensor, Tensor, Tensor]
"""Queries [S, Q, D], keys [S, H, D] and values [S, H, D] of the new token of each slot."""


class DecodeView:
    """Attention view of slots 0 to n - 1 of the cache, each with one new token.

    If the cache has a prompt store, a slot attends to the first `prompts` tokens in its pages and then to its own tokens.
    `longest` and `even` describe the lengths of the slots including the new token, as known on the host; a kernel reads the
    lengths on the device. With `readers`, a kernel reads a prompt once for several slots (`prompt_readers`).
    With `kernels=False` no kernel is compiled. With `updates_states=False` recurrent layers do not change the slots' states.
    """

    routing: RecordedRouting | None = None

    def __init__(
        self,
        cache: SlotCache,
        positions_S: Tensor,
        lengths_S: Tensor,
        prompts_S: Tensor | None = None,
        readers_AM: Tensor | None = None,
        *,
        longest: int = 0,
        even: bool = False,
        kernels: bool = True,
        updates_states: bool = True,
    ):
        self.cache, self.positions_S, self.lengths_S = cache, positions_S, lengths_S
        self.prompts_S = None if cache.prompts is None else prompts_S
        self.readers_AM = readers_AM
        self.updates_states = updates_states
        self.longest, self.even = longest, even
        self.fused = kernels and usable(cache.shape.device)
        if self.fused:
            processors = processors_of(cache.shape.device)
            row_tokens = cache.capacity
            if cache.prompts is not None and readers_AM is None:
                row_tokens += RESPONSE_TOKENS if cache.prompts.responses else PROMPT_TOKENS
            self.splits = splits_for(len(positions_S), cache.shape.kv_heads, row_tokens, processors)
            if cache.windows is not None:
                heads, tokens = cache.windows.shape.local.kv_heads, cache.windows.capacity
                self.window_splits = splits_for(len(positions_S), heads, tokens, processors)
        else:
            self.rows = torch.arange(len(positions_S), device=positions_S.device)
            self.most_stored = 0 if self.prompts_S is None else int(self.prompts_S.max())

    def attend(self, layer, queries_SQ1D, keys_SH1D, values_SH1D, scale, mask, form=PLAIN):
        new = (queries_SQ1D.squeeze(2), keys_SH1D.squeeze(2), values_SH1D.squeeze(2))
        source = self.cache.sources.get(layer, layer)
        if form.window is not None:
            out_SQD = self._windowed(source, *new, scale, form)  # a layer without keys writes the keys it reads a second time
        else:
            attend = self._fused if self.fused else self._plain
            out_SQD = attend(self.cache.index_of_layer[source], new, scale, form, reads=source != layer)
        return out_SQD[:, :, None]

    def recur(self, layer: int, mixer: Mixer, hidden_S1D: Tensor) -> Tensor:
        """Run one token of each slot, and update the slots' states."""
        assert self.cache.states is not None
        states = self.cache.states.rows(layer, 0, len(self.positions_S))
        if not self.updates_states:
            states = {name: tensor.clone() for name, tensor in states.items()}
        return mixer.resume(hidden_S1D, states)

    def _windowed(
        self, layer: int, queries_SQD: Tensor, keys_SHD: Tensor, values_SHD: Tensor, scale: float, form: AttentionForm
    ) -> Tensor:
        """Attend over the slots' windows. A ring holds only the tokens of the window, so no key is masked by position."""
        windows = self.cache.windows
        assert windows is not None
        if self.fused:
            rings = (windows.keys_lSHCD[windows.index_of_layer[layer]], windows.values_lSHCD[windows.index_of_layer[layer]])
            return attend_in_ring(
                *(queries_SQD, keys_SHD, values_SHD, *rings, self.positions_S),
                scale=scale,
                form=form,
                splits=self.window_splits,
            )
        windows.append(layer, self.positions_S, keys_SHD, values_SHD)
        lengths_S = (self.positions_S + 1).clamp(max=windows.capacity)
        shortest, longest = self.window_range
        rings = windows.read(layer, len(self.positions_S))
        return decode_attention(
            queries_SQD, *rings, lengths_S, longest=longest, even=shortest == longest, scale=scale, form=form
        )

    @cached_property
    def window_range(self) -> tuple[int, int]:
        """Tokens of the shortest and the longest ring, with the new token."""
        assert self.cache.windows is not None
        shortest, longest = torch.stack(torch.aminmax(self.positions_S)).tolist()
        return min(shortest + 1, self.cache.windows.capacity), min(longest + 1, self.cache.windows.capacity)

    def _fused(self, layer: int, new: NewToken, scale: float, form: AttentionForm, *, reads: bool) -> Tensor:
        """Attend in one kernel that also stores the new token. A layer that reads another layer's keys stores them a second time,
        but stores no queries."""
        cache, store = self.cache, self.cache.prompts
        ring_SQWD = cache.queries_LSQWD[layer, :, :, :0] if reads else cache.queries_LSQWD[layer]
        bookkeeping = (cache.positions_LSHC[layer], ring_SQWD, self.lengths_S, self.positions_S)
        own = cache.stored.map(lambda tensor: tensor[layer])
        prompt = None if store is None else store.stored.map(lambda tensor: tensor[layer])
        if cache.quantiser is not None:
            codes = None if prompt is None else StoredCodes(prompt, *self._pages(), self.readers_AM)
            scales = (each[layer] for each in cache.quantiser.scales)
            return attend_and_append_codes(
                *new, own, *bookkeeping, *scales, prompts=codes, scale=scale, form=form, splits=self.splits
            )
        prompts = None if prompt is None else StoredPrompts(prompt.keys, prompt.values, *self._pages(), self.readers_AM)
        return attend_and_append(
            *new, own.keys, own.values, *bookkeeping, prompts=prompts, scale=scale, form=form, splits=self.splits
        )

    def _plain(self, layer: int, new: NewToken, scale: float, form: AttentionForm, *, reads: bool) -> Tensor:
        cache, active = self.cache, len(self.rows)
        queries_SQD, keys_SHD, values_SHD = new
        if not reads:
            cache.append(layer, self.rows, keys_SHD, values_SHD)
            cache.append_queries(layer, self.rows, queries_SQD, self.positions_S)
        keys_SHTD, values_SHTD = cache.read(layer, slice(active), self.longest)
        lengths_S = self.lengths_S + 1
        if cache.prompts is None or not self.most_stored:
            return decode_attention(
                *(queries_SQD, keys_SHTD, values_SHTD, lengths_S),
                longest=self.longest,
                even=self.even,
                scale=scale,
                form=form,
            )
        if cache.prompts.responses:
            pages_SP, stored_S = self._pages()
            stored = cache.prompts.read(layer, pages_SP, pages_of(self.most_stored) * PAGE_TOKENS)
            own = (keys_SHTD, values_SHTD, lengths_S)
            return paged_decode_attention(queries_SQD, *stored, stored_S, *own, scale=scale, form=form)
        read, cap = partial(cache.prompts.read, layer), form.softcap
        out_SQD = merged_parts(
            prompt_attention(queries_SQD, *self._pages(), read, scale=scale, softcap=cap),
            attention_part(queries_SQD, keys_SHTD, values_SHTD, lengths_S, scale=scale, softcap=cap),
            sinks_Q=form.sinks_Q,
        )
        return out_SQD.to(queries_SQD.dtype)

    def _pages(self) -> tuple[Tensor, Tensor]:
        """Return the page table of the slots' prompts, and the lengths of the prompts."""
        assert self.cache.prompts is not None and self.prompts_S is not None
        return self.cache.prompts.pages_SP[: len(self.positions_S)], self.prompts_S

    def advance(self) -> None:
        """Add the new token to the lengths. Call it after all layers have stored the token."""
        if self.fused:
            self.lengths_S += 1
        else:
            self.cache.advance(self.rows, self.positions_S)


@dataclass
class SlotState:
    """Host-side state of the active slots before a launch, with one entry per slot."""

    tokens: list[int]
    positions: list[int]
    lengths: list[int]
    prompts: list[int]
    """Tokens of each slot in the prompt store; 0 if the cache has none."""
    seeds: list[int]
    last_positions: list[int]
    """Last position that a step may reach. A finished sequence stays at this position."""
