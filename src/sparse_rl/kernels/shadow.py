"""The shadow of a whole packed row in one FlexAttention call per layer: each query sees what the sampler saw.

The evictions of a pack are one number for each key: `until`, the first packed query that does not see it, which is never
beyond the end of the key's own sequence. A query at t sees the key at j iff j <= t < until[j], so sequences do not see each
other and nothing of T x T is ever stored. FlexAttention skips blocks of 128 queries by 128 keys that see nothing of each
other; which these are follows from the smallest and the largest `until` of a block of keys.
"""

# L layers, Q query heads, H kv heads, G query heads of a kv head, N packed tokens, P of them with padding, B blocks of P
# D head dimension

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..errors import first_line

BLOCK = 128
SMALLEST_HEAD = 16  # FlexAttention's
COMPILATIONS = 64
"""Of one function. Lengths are rounded up to powers of two, so that few are needed: each takes seconds."""


class Shadow:
    """What the queries of a pack may see, in all layers."""

    def __init__(self, until_LHN: Tensor):
        self.tokens = until_LHN.shape[-1]
        self.padded = padded_length(self.tokens)
        self.until_LHP = F.pad(until_LHN, (0, self.padded - self.tokens))  # padding is seen by nobody and sees nothing
        some_LHBB, all_LHBB = block_relations(self.until_LHP)
        partial_LHBB = some_LHBB & ~all_LHBB
        self.lists: dict[str, Any] = {}  # as BlockMask names them
        for prefix, chosen in (("", partial_LHBB), ("full_", all_LHBB)):
            for side, rows in (("kv", chosen), ("q", chosen.transpose(-1, -2))):
                counts, indices = _listed(rows)
                self.lists |= {f"{prefix}{side}_num_blocks": counts, f"{prefix}{side}_indices": indices}

    def block_mask(self, layer: int, q_heads: int) -> BlockMask:
        until_HP = self.until_LHP[layer]
        groups = q_heads // until_HP.shape[0]

        def sees(batch, head, query, key):
            return (key <= query) & (query < until_HP[head // groups, key])

        lists = {name: each[layer].repeat_interleave(groups, dim=0)[None] for name, each in self.lists.items()}
        return BlockMask((self.padded, self.padded), **lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)

    def attend(self, layer: int, queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor, scale: float) -> Tensor:
        """[1, Q, N, D]. What backward keeps grows with N, and with N^2 only as the lists of blocks do, 16384 times slower."""
        padding = self.padded - self.tokens
        q, k, v = (F.pad(each, (0, 0, 0, padding)) if padding else each for each in (queries_1QND, keys_1HND, values_1HND))
        mask = self.block_mask(layer, q.shape[1])
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            return _compiled()(q, k, v, mask, scale)[:, :, : self.tokens]


def padded_length(tokens: int) -> int:
    """The next power of two, at least a block."""
    return max(BLOCK, 1 << (tokens - 1).bit_length())


def block_relations(until_LHP: Tensor) -> tuple[Tensor, Tensor]:
    """(some, all), bool [L, H, query block, key block]: whether some query of the one may see some key of the other (where
    it is false, none does), and whether all see all."""
    blocks_LHBK = until_LHP.unflatten(-1, (-1, BLOCK))
    first_B = torch.arange(0, until_LHP.shape[-1], BLOCK, device=until_LHP.device, dtype=until_LHP.dtype)
    last_B = first_B + (BLOCK - 1)
    earliest, latest = (each[:, :, None] for each in (blocks_LHBK.amin(-1), blocks_LHBK.amax(-1)))
    some = (first_B <= last_B[:, None]) & (latest > first_B[:, None])
    every = (last_B <= first_B[:, None]) & (earliest > last_B[:, None])
    return some, every


def _listed(chosen_LHBB: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks how many are chosen, and all of them with the chosen ones first, as FlexAttention wants them."""
    order = chosen_LHBB.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen_LHBB.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def usable(queries_1QND: Tensor) -> bool:
    return queries_1QND.is_cuda and queries_1QND.shape[-1] >= SMALLEST_HEAD and not _broken


_broken: list[Exception] = []


def give_up(error: Exception) -> None:
    """FlexAttention could not be compiled here: from now on `usable` says so."""
    warnings.warn(
        "FlexAttention does not run here, so shadow passes hold a mask of T x T and take longer "
        f"({type(error).__name__}: {first_line(error)}).",
        stacklevel=2,
    )
    _broken.append(error)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


@cache
def _compiled():
    return torch.compile(_flex, fullgraph=True, dynamic=False)
