"""The decode step: feed one token of each active slot, attend over its cached keys, and return the next token of each."""

# S active slots, Q query heads, H kv heads, D head dimension, V vocabulary

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.attention import decode_attention
from ..kernels.jit import usable
from ..kernels.slot_attention import attend_and_append, splits_for
from ..kv.cache import SlotCache


class DecodeView:
    """Attention view of slots 0 to n - 1 of the cache, each with one new token.

    `longest` and `even` describe the lengths including the new token, as known on the host; a kernel reads the lengths on the
    device. With `kernels=False` no kernel is compiled.
    """

    def __init__(
        self,
        cache: SlotCache,
        positions_S: Tensor,
        lengths_S: Tensor,
        *,
        longest: int = 0,
        even: bool = False,
        kernels: bool = True,
    ):
        self.cache, self.positions_S, self.lengths_S = cache, positions_S, lengths_S
        self.longest, self.even = longest, even
        self.fused = kernels and usable(cache.shape.device)
        if self.fused:
            processors = torch.cuda.get_device_properties(cache.shape.device).multi_processor_count
            self.splits = splits_for(len(positions_S), cache.shape.kv_heads, cache.capacity, processors)
        else:
            self.rows = torch.arange(len(positions_S), device=positions_S.device)

    def attend(self, layer, queries_SQ1D, keys_SH1D, values_SH1D, scale, mask):
        new = (queries_SQ1D.squeeze(2), keys_SH1D.squeeze(2), values_SH1D.squeeze(2))
        out_SQD = self._fused(layer, *new, scale) if self.fused else self._plain(layer, *new, scale)
        return out_SQD[:, :, None]

    def _fused(self, layer: int, queries_SQD: Tensor, keys_SHD: Tensor, values_SHD: Tensor, scale: float) -> Tensor:
        cache = self.cache
        return attend_and_append(
            *(queries_SQD, keys_SHD, values_SHD),
            *(cache.keys_LSHCD[layer], cache.values_LSHCD[layer], cache.positions_LSHC[layer], cache.queries_LSQWD[layer]),
            *(self.lengths_S, self.positions_S),
            scale=scale,
            splits=self.splits,
        )

    def _plain(self, layer: int, queries_SQD: Tensor, keys_SHD: Tensor, values_SHD: Tensor, scale: float) -> Tensor:
        cache, active = self.cache, len(self.rows)
        cache.append(layer, self.rows, keys_SHD, values_SHD)
        cache.append_queries(layer, self.rows, queries_SQD, self.positions_S)
        return decode_attention(
            queries_SQD,
            cache.keys_LSHCD[layer, :active],
            cache.values_LSHCD[layer, :active],
            self.lengths_S + 1,
            longest=self.longest,
            even=self.even,
            scale=scale,
        )

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
    seeds: list[int]
    last: list[int]
    """Last position that a step may reach. A finished sequence stays at this position."""
