"""Attention for sampler and learner: one query over a slot, with or without a stored prompt, causal sequences, and shadow
attention over one sequence.

Sequences that share one row are packed: they follow each other without padding. `cu_seqlens` holds their boundaries, from 0 to
N. `shadow.py` computes shadow attention for a whole packed row on a GPU.
"""

# B rows, S slots, Q query heads, H kv heads, G query heads per kv head, T tokens, N packed tokens, M packed keys, C capacity, D
# head dimension, P pages of a prompt, n segments of a row, or prompts, m slots of a prompt, t stored tokens, U = t + T

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sizes import pages_of
from .form import PLAIN, AttentionForm, capped, last_tokens_masked, masked_attention

HALF = (torch.bfloat16, torch.float16)
SHADOW_TILE = 512  # queries per tile; the mask of a tile is [H, tile, T]


def decode_attention(
    queries_SQD: Tensor,
    keys_SHCD: Tensor,
    values_SHCD: Tensor,
    lengths_S: Tensor,
    *,
    longest: int,
    even: bool,
    scale: float,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Return the attention output [S, Q, D] of each slot's query over the first `lengths` keys of its row.

    The query heads of a kv head are treated as a sequence of queries, so keys are never repeated. The host provides `longest`
    and `even` (True if all lengths are equal), so that no key beyond them is read or masked.
    """
    held_ST = None if even else torch.arange(longest, device=lengths_S.device) < lengths_S[:, None]
    return _attend_slots(queries_SQD, keys_SHCD[:, :, :longest], values_SHCD[:, :, :longest], held_ST, scale, form)


def _attend_slots(
    queries_SQD: Tensor, keys_SHTD: Tensor, values_SHTD: Tensor, held_ST: Tensor | None, scale: float, form: AttentionForm
) -> Tensor:
    """Return the attention output [S, Q, D] of each slot's query over the keys that `held` marks; None for all."""
    if not form.is_plain:
        sees = None if held_ST is None else held_ST[:, None, None, None]
        return masked_attention(queries_SQD[:, :, None], keys_SHTD, values_SHTD, sees, scale, form)[:, :, 0]
    queries_SHGD = queries_SQD.unflatten(1, (keys_SHTD.shape[1], -1))
    mask = None if held_ST is None else held_ST[:, None, None]
    out_SHGD = F.scaled_dot_product_attention(queries_SHGD, keys_SHTD, values_SHTD, attn_mask=mask, scale=scale)
    return out_SHGD.reshape(queries_SQD.shape)


def attention_part(
    queries_SQD: Tensor,
    keys_SHTD: Tensor,
    values_SHTD: Tensor,
    lengths_S: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention output over the first `lengths` keys of each row, and the log-sum-exp of its logits.

    The results are float32 [S, Q, D] and [S, Q]. `merged_parts` combines the results of several segments. A row must have at
    least one key.
    """
    slots, q_heads, dim = queries_SQD.shape
    kv_heads, total = keys_SHTD.shape[1:3]
    queries_SHGD = queries_SQD.float().view(slots, kv_heads, q_heads // kv_heads, dim)
    logits_SHGT = capped(queries_SHGD @ keys_SHTD.float().transpose(-1, -2) * scale, softcap)
    held_ST = torch.arange(total, device=lengths_S.device) < lengths_S[:, None]
    logits_SHGT = logits_SHGT.masked_fill(~held_ST[:, None, None], -torch.inf)
    sums_SHG = logits_SHGT.logsumexp(dim=-1)
    out_SHGD = (logits_SHGT - sums_SHG[..., None]).exp() @ values_SHTD.float()
    return out_SHGD.reshape(slots, q_heads, dim), sums_SHG.reshape(slots, q_heads)


def merged_parts(*parts: tuple[Tensor, Tensor], sinks_Q: Tensor | None = None) -> Tensor:
    """Return the attention output [S, Q, D] over all segments. Each part is the result of `attention_part` for one segment.

    A segment's share of the softmax is exp(its log-sum-exp - the log-sum-exp of all). A sink is a segment without values.
    """
    outs_nSQD, sums_nSQ = (torch.stack(each) for each in zip(*parts, strict=True))
    if sinks_Q is not None:
        sums_nSQ = torch.cat([sums_nSQ, sinks_Q.float().expand_as(sums_nSQ[:1])])
    return (sums_nSQ.softmax(dim=0)[: len(outs_nSQD), ..., None] * outs_nSQD).sum(dim=0)


def prompt_attention(
    queries_SQD: Tensor,
    pages_SP: Tensor,
    lengths_S: Tensor,
    read: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention output of each slot's query over its stored prompt, and the log-sum-exp of its logits, as
    `attention_part` does.

    `read` returns the keys and values [n, H, T, D] of the first tokens in some pages [n, P]. Each prompt is read once for all
    slots that attend to it, and prompts with as many pages and slots are read together.
    """
    slots_of: dict[int, list[int]] = defaultdict(list)
    for slot, first_page in enumerate(pages_SP[:, 0].tolist()):
        slots_of[first_page].append(slot)
    tokens = lengths_S.tolist()
    alike: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for slots in slots_of.values():
        alike[pages_of(tokens[slots[0]]), len(slots)].append(slots)
    dim = queries_SQD.shape[2]
    out_SQD, sums_SQ = torch.empty_like(queries_SQD, dtype=torch.float32), queries_SQD.new_empty(queries_SQD.shape[:2]).float()
    for together in alike.values():
        slots_nm = torch.tensor(together, device=lengths_S.device)
        first_n = slots_nm[:, 0]
        keys_nHTD, values_nHTD = read(pages_SP[first_n], max(tokens[slots[0]] for slots in together))
        # the queries of all slots of a prompt are those of one row with more query heads per kv head
        queries_nHmGD = queries_SQD[slots_nm].unflatten(2, (keys_nHTD.shape[1], -1)).transpose(1, 2)
        inputs = (queries_nHmGD.reshape(len(together), -1, dim), keys_nHTD, values_nHTD, lengths_S[first_n])
        part = attention_part(*inputs, scale=scale, softcap=softcap)
        out_SQD[slots_nm] = part[0].view(queries_nHmGD.shape).transpose(1, 2).flatten(2, 3)
        sums_SQ[slots_nm] = part[1].view(queries_nHmGD.shape[:4]).transpose(1, 2).flatten(2, 3)
    return out_SQD, sums_SQ


def paged_decode_attention(
    queries_SQD: Tensor,
    stored_keys_SHtD: Tensor,
    stored_values_SHtD: Tensor,
    stored_S: Tensor,
    keys_SHTD: Tensor,
    values_SHTD: Tensor,
    lengths_S: Tensor,
    *,
    scale: float,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Return the attention output [S, Q, D] of each slot's query over the first `stored` keys that were gathered from its
    pages and the first `lengths` keys of its row."""
    keys_SHUD = torch.cat([stored_keys_SHtD, keys_SHTD], dim=2)
    values_SHUD = torch.cat([stored_values_SHtD, values_SHTD], dim=2)
    held_SU = torch.cat(
        [
            torch.arange(count, device=lengths_S.device) < each_S[:, None]
            for count, each_S in ((stored_keys_SHtD.shape[2], stored_S), (keys_SHTD.shape[2], lengths_S))
        ],
        dim=1,
    )
    return _attend_slots(queries_SQD, keys_SHUD, values_SHUD, held_SU, scale, form)


def causal_attention(
    queries_BQTD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, *, scale: float, form: AttentionForm = PLAIN
) -> Tensor:
    """Return the causal attention output [B, Q, T, D] of whole sequences."""
    form = form.within(keys_BHTD.shape[2])
    if form.window is not None or not form.is_plain:
        return last_tokens_masked(queries_BQTD, keys_BHTD, values_BHTD, scale, form)
    keys_BHTD, values_BHTD = repeated_if_needed(queries_BQTD, keys_BHTD, values_BHTD)
    grouped = queries_BQTD.shape[1] > keys_BHTD.shape[1]
    return F.scaled_dot_product_attention(
        queries_BQTD, keys_BHTD, values_BHTD, is_causal=True, scale=scale, enable_gqa=grouped
    )


def repeated_if_needed(queries_BQTD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values. In float32 on a GPU, they are repeated for every query head.

    torch's only kernel for grouped-query attention in float32 stores all T x T scores. Repeated keys are far smaller.
    """
    groups = queries_BQTD.shape[1] // keys_BHTD.shape[1]
    if groups == 1 or not queries_BQTD.is_cuda or queries_BQTD.dtype in HALF:
        return keys_BHTD, values_BHTD
    return keys_BHTD.repeat_interleave(groups, dim=1), values_BHTD.repeat_interleave(groups, dim=1)


def packed_causal_attention(
    queries_1QND: Tensor,
    keys_1HND: Tensor,
    values_1HND: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Return the causal attention output [1, Q, N, D] of packed sequences, each attending only to itself. It is
    differentiable.

    `cu_seqlens` is int32, has one entry more than there are sequences, and is on the device of the queries. `longest` is the
    length of the longest sequence. In half precision on a GPU, one kernel computes all sequences. It copies nothing if the
    tensors are transposed views of [1, N, heads, D], as in transformers. Otherwise each sequence is a separate call.
    """
    form = form.within(longest)
    if has_varlen(queries_1QND, form):
        q, k, v = (each[0].transpose(0, 1) for each in (queries_1QND, keys_1HND, values_1HND))
        bounds = (cu_seqlens, cu_seqlens, longest, longest)
        return varlen_causal_attention(q, k, v, *bounds, scale, form.window).transpose(0, 1)[None]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(cu_seqlens.tolist())]
    outputs = [
        causal_attention(queries_1QND[:, :, span], keys_1HND[:, :, span], values_1HND[:, :, span], scale=scale, form=form)
        for span in spans
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def has_varlen(queries: Tensor, form: AttentionForm = PLAIN) -> bool:
    """Return whether one kernel computes all packed sequences for queries of this shape, dtype and device."""
    dim = queries.shape[-1]
    if not form.is_plain or (form.window is not None and "window_size" not in _varlen_options()):
        return False
    return queries.is_cuda and queries.dtype in HALF and dim % 8 == 0 and dim <= 256 and _ampere(queries.device)


@cache
def _ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_causal_attention(
    queries_NQD: Tensor,
    keys_MHD: Tensor,
    values_MHD: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return the attention output [N, Q, D] of packed sequences. If a sequence has more keys than queries, its queries are the
    last ones: the last query sees all keys, or those of its window."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale}
    known = _varlen_options()
    options |= {"window_size": (-1 if window is None else window - 1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:  # without this argument, the kernel always supports grouped-query attention
        options["enable_gqa"] = queries_NQD.shape[1] != keys_MHD.shape[1]
    bounds = (query_bounds, key_bounds, most_queries, most_keys)
    out_NQD = varlen_attn(queries_NQD, keys_MHD, values_MHD, *bounds, **options)
    assert isinstance(out_NQD, Tensor)
    return out_NQD


@cache
def _varlen_options() -> frozenset[str]:
    """Return the argument names of torch's varlen function, which change between torch releases."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def shadow_attention(
    queries_1QTD: Tensor,
    keys_1HTD: Tensor,
    values_1HTD: Tensor,
    evicted_at_HT: Tensor,
    *,
    scale: float,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Return the attention output [1, Q, T, D] of a whole sequence as the sampler saw it.

    The query at t sees the key at j iff j <= t < evicted_at[j].
    """
    _, q_heads, total, dim = queries_1QTD.shape
    kv_heads = keys_1HTD.shape[1]
    queries_HGTD = queries_1QTD.view(kv_heads, q_heads // kv_heads, total, dim)
    keys_HGTD = keys_1HTD[0, :, None].expand(-1, q_heads // kv_heads, -1, -1)
    values_HGTD = values_1HTD[0, :, None].expand(-1, q_heads // kv_heads, -1, -1)
    time_T = torch.arange(total, device=evicted_at_HT.device)
    tiles = []
    for start in range(0, total, SHADOW_TILE):
        stop = min(start + SHADOW_TILE, total)
        query_time = time_T[start:stop, None]
        sees = (time_T[:stop] <= query_time) & (query_time < evicted_at_HT[:, None, None, :stop])
        if not form.is_plain:
            part = (queries_1QTD[:, :, start:stop], keys_1HTD[:, :, :stop], values_1HTD[:, :, :stop])
            tiles.append(masked_attention(*part, sees[None], scale, form)[0].unflatten(0, queries_HGTD.shape[:2]))
            continue
        tiles.append(
            F.scaled_dot_product_attention(
                queries_HGTD[:, :, start:stop], keys_HGTD[:, :, :stop], values_HGTD[:, :, :stop], attn_mask=sees, scale=scale
            )
        )
    return torch.cat(tiles, dim=2).reshape(1, q_heads, total, dim)
