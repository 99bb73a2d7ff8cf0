"""The decode step: one token of every active slot in, attention over the slots' rows, one token of each out."""

# S active slots, Q query heads, H kv heads, D head dimension, V vocabulary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.attention import decode_attention
from ..kernels.counter_rng import uniform
from ..kv.cache import SlotCache
from ..models.attention import run
from .sampling import sample
from .settings import Sampling


class DecodeView:
    """Slots 0 to n - 1 of the cache, each with one new token."""

    def __init__(self, cache: SlotCache, positions_S: Tensor, *, longest: int, even: bool):
        self.cache, self.positions_S, self.longest, self.even = cache, positions_S, longest, even
        self.rows = torch.arange(len(positions_S), device=positions_S.device)

    def attend(self, layer, queries_SQ1D, keys_SH1D, values_SH1D, scale, mask):
        cache, active = self.cache, len(self.rows)
        cache.append(layer, self.rows, keys_SH1D.squeeze(2), values_SH1D.squeeze(2))
        cache.append_queries(layer, self.rows, queries_SQ1D.squeeze(2), self.positions_S)
        out_SQD = decode_attention(
            queries_SQ1D.squeeze(2),
            cache.keys_LSHCD[layer, :active],
            cache.values_LSHCD[layer, :active],
            cache.lengths_S[:active] + 1,
            longest=self.longest,
            even=self.even,
            scale=scale,
        )
        return out_SQD[:, :, None]


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
    view = DecodeView(cache, positions_S, longest=longest, even=even)
    logits_SV = run(model, tokens_S[:, None], positions_S[:, None], view, keep=1)[:, -1]
    cache.advance(view.rows, positions_S)
    return sample(logits_SV, uniform(seeds_S, positions_S + 1), sampling)
