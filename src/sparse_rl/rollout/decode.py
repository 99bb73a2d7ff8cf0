"""The decode step: one token of every active slot in, attention over the slots' rows, one token of each out."""

# S active slots, Q query heads, H kv heads, D head dimension, V vocabulary

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import Sampling
from ..kernels.attention import decode_attention
from ..kernels.counter_rng import uniform
from ..kernels.jit import usable
from ..kernels.linear import decode_context
from ..kernels.slot_attention import attend_and_append, splits_for
from ..kv.cache import SlotCache
from ..models.attention import run
from .clock import Clock
from .sampling import sample


class DecodeView:
    """Slots 0 to n - 1 of the cache, each with one new token. `longest` and `even` tell of the lengths after it, where the
    host knows them; a kernel asks the device. Without `kernels`, none is compiled."""

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
        """Count the token, once all layers have it."""
        if self.fused:
            self.lengths_S += 1
        else:
            self.cache.advance(self.rows, self.positions_S)


@dataclass
class SlotState:
    """The active slots before some steps, one entry each: what the host knows and a step needs."""

    tokens: list[int]
    positions: list[int]
    lengths: list[int]
    seeds: list[int]
    last: list[int]
    """The position no step may pass: a sequence that has ended idles there."""


class Steps:
    """Steps one by one, as a CPU does them; `graph.DecodeGraphs` is the same as CUDA graphs."""

    overlaps = False

    def __init__(self, model: PreTrainedModel, cache: SlotCache):
        self.model, self.cache = model, cache

    def start(self, slots: SlotState, sampling: Sampling) -> None:
        device = self.cache.shape.device
        self.sampling = sampling
        self.tokens_S, self.positions_S, self.seeds_S, self.last_S = (
            torch.tensor(each, device=device) for each in (slots.tokens, slots.positions, slots.seeds, slots.last)
        )
        self.longest = max(slots.lengths)
        self.even = self.longest == min(slots.lengths)
        self.cache.lengths_S[: len(slots.lengths)] = torch.tensor(slots.lengths, device=device)

    def launch(self, steps: int, clock: Clock) -> "Done":
        """Take that many steps."""
        with clock.part("decode"), decode_context(self.model):
            drawn = [self._step() for _ in range(steps)]
        tokens, logprobs = (torch.stack(each, dim=1).cpu() for each in zip(*drawn, strict=True))
        return Done(tokens, logprobs)

    def _step(self) -> tuple[Tensor, Tensor]:
        """The next token [S] of each active slot and its log-prob [S]."""
        self.longest += 1
        lengths_S = self.cache.lengths_S[: len(self.tokens_S)]
        view = DecodeView(self.cache, self.positions_S, lengths_S, longest=self.longest, even=self.even)
        logits_SV = run(self.model, self.tokens_S[:, None], self.positions_S[:, None], view, keep=1)[:, -1]
        view.advance()
        self.tokens_S, logprobs_S = sample(logits_SV, uniform(self.seeds_S, self.positions_S + 1), self.sampling)
        self.positions_S = torch.minimum(self.positions_S + 1, self.last_S)
        return self.tokens_S, logprobs_S


@dataclass(frozen=True)
class Done:
    """Steps that were taken."""

    tokens_Sn: Tensor
    logprobs_Sn: Tensor

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [S, n]."""
        return self.tokens_Sn.numpy(), self.logprobs_Sn.float().numpy()
