"""Shadow attention of a whole packed row in one FlexAttention call per layer: each query sees the keys that the sampler saw.

The evictions of a pack are one number per key: `until`, the first packed query that does not see the key. It never exceeds the
end of the key's own sequence. A query at t sees the key at j iff j <= t < until[j]. Sequences therefore do not see each other,
and no T x T tensor is stored. FlexAttention skips blocks of 128 queries by 128 keys in which no query sees any key. The
smallest and the largest `until` of a block of keys determine which blocks are skipped.
"""

# L layers, Q query heads, H kv heads, N packed tokens, P packed tokens with padding, B blocks of the padded row, D head
# dimension

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..errors import first_line
from ..sizes import SHADOW_BLOCK, padded_length
from .form import PLAIN, AttentionForm, capped

SMALLEST_HEAD = 16  # FlexAttention's limit
COMPILATIONS = 64
"""Maximum number of compilations, each of which takes seconds. Lengths are rounded up to powers of two to limit their number."""


class Shadow:
    """Visibility of the keys of a pack to its queries, for all layers."""

    def __init__(self, until_LHN: Tensor):
        self.tokens = until_LHN.shape[-1]
        self.padded = padded_length(self.tokens)
        self.until_LHP = F.pad(until_LHN, (0, self.padded - self.tokens))  # no query sees padding, and padding sees no key
        some_LHBB, all_LHBB = block_relations(self.until_LHP)
        partial_LHBB = some_LHBB & ~all_LHBB
        self.lists: dict[str, Any] = {}  # the keys are BlockMask's argument names
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
        return BlockMask((self.padded, self.padded), **lists, BLOCK_SIZE=(SHADOW_BLOCK, SHADOW_BLOCK), mask_mod=sees)

    def attend(
        self,
        layer: int,
        queries_1QND: Tensor,
        keys_1HND: Tensor,
        values_1HND: Tensor,
        scale: float,
        form: AttentionForm = PLAIN,
    ) -> Tensor:
        """Return the attention output [1, Q, N, D].

        The memory for backward grows linearly with N. Only the block lists grow with N^2, divided by 16384.
        """
        padding = self.padded - self.tokens
        q, k, v = (F.pad(each, (0, 0, 0, padding)) if padding else each for each in (queries_1QND, keys_1HND, values_1HND))
        mask = self.block_mask(layer, q.shape[1])
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            if form.sinks_Q is None:
                return _compiled()(q, k, v, mask, scale, form.softcap)[:, :, : self.tokens]
            out, sums = (each[:, :, : self.tokens] for each in _compiled()(q, k, v, mask, scale, form.softcap, with_sums=True))
        share = torch.sigmoid(sums - form.sinks_Q.to(sums.dtype)[:, None])  # of the keys in a softmax over keys and sink
        return out * share[..., None].to(out.dtype)


def block_relations(until_LHP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (some, all), both bool [L, H, query block, key block].

    `some` is False if no query of the query block sees any key of the key block. `all` is True if every query sees every key.
    """
    blocks_LHBK = until_LHP.unflatten(-1, (-1, SHADOW_BLOCK))
    first_B = torch.arange(0, until_LHP.shape[-1], SHADOW_BLOCK, device=until_LHP.device, dtype=until_LHP.dtype)
    last_B = first_B + (SHADOW_BLOCK - 1)
    earliest, latest = (each[:, :, None] for each in (blocks_LHBK.amin(-1), blocks_LHBK.amax(-1)))
    some = (first_B <= last_B[:, None]) & (latest > first_B[:, None])
    every = (last_B <= first_B[:, None]) & (earliest > last_B[:, None])
    return some, every


def _listed(chosen_LHBB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks in each row, and all block indices with the chosen ones first, as FlexAttention
    expects."""
    order = chosen_LHBB.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen_LHBB.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def usable(queries_1QND: Tensor) -> bool:
    return queries_1QND.is_cuda and queries_1QND.shape[-1] >= SMALLEST_HEAD and not _broken


_broken: list[Exception] = []


def give_up(error: Exception) -> None:
    """Record that FlexAttention cannot be compiled here. `usable` returns False afterwards."""
    warnings.warn(
        f"FlexAttention is not available, so shadow passes use a dense T x T mask and are slower ({type(error).__name__}: "
        f"{first_line(error)}).",
        stacklevel=2,
    )
    _broken.append(error)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, softcap: float | None = None, *, with_sums: bool = False
) -> Any:
    """Return the attention output and, with `with_sums`, the log-sum-exp of the logits [1, Q, N]."""

    def cap(logit, batch, head, query, key):
        return capped(logit, softcap)

    score = None if softcap is None else cap
    options: dict[str, Any] = {"score_mod": score, "block_mask": mask, "scale": scale, "enable_gqa": True}
    if not with_sums:
        return flex_attention(q, k, v, **options)
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compiled():
    return torch.compile(_flex, fullgraph=True, dynamic=False)
