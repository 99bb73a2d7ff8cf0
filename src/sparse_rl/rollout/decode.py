"""The decode step: one token of every active slot in, attention over the slots' rows, one token of each out."""

# S active slots, Q query heads, H kv heads, D head dimension, V vocabulary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.attention import decode_attention
from ..kernels.counter_rng import uniform
from ..kernels.jit import usable
from ..kernels.slot_attention import attend_and_append, splits_for
from ..kv.cache import SlotCache
from ..models.attention import run
from .sampling import sample
from .settings import Sampling


class DecodeView:
    """Slots 0 to n - 1 of the cache, each with one new token. `longest` and `even` tell of the lengths after it, where the
    host knows them; a kernel asks the device."""

    def __init__(self, cache: SlotCache, positions_S: Tensor, lengths_S: Tensor, *, longest: int = 0, even: bool = False):
        self.cache, self.positions_S, self.lengths_S = cache, positions_S, lengths_S
        self.longest, self.even = longest, even
        self.fused = usable(cache.shape.device)
        if self.fused:
            self.splits = splits_for(len(positions_S), cache.shape.kv_heads, cache.capacity, cache.shape.device)
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
        """Count the token, once all layers have it."""
        if self.fused:
            self.lengths_S += 1
        else:
            self.cache.advance(self.rows, self.positions_S)


def decode_step(
    model: PreTrainedModel,
    cache: SlotCache,
    tokens_S: Tensor,
    positions_S: Tensor,
    seeds_S: Tensor,
    sampling: Sampling,
    *,
    longest: int,
    even: bool,
) -> tuple[Tensor, Tensor]:
    """The next token [S] of each active slot and its log-prob [S]; `longest` and `even` tell of the lengths after it."""
    view = DecodeView(cache, positions_S, cache.lengths_S[: len(tokens_S)], longest=longest, even=even)
    logits_SV = run(model, tokens_S[:, None], positions_S[:, None], view, keep=1)[:, -1]
    view.advance()
    return sample(logits_SV, uniform(seeds_S, positions_S + 1), sampling)
