"""Attention as the sampler and the learner need it, in plain torch: one query over a slot, a causal prompt, a shadow."""

# B rows, S slots, Q query heads, H kv heads, G query heads of a kv head, T tokens, C capacity, D head dimension

import torch
import torch.nn.functional as F
from torch import Tensor

SHADOW_TILE = 512  # queries at a time: the mask of a tile is [H, tile, T]


def decode_attention(
    queries_SQD: Tensor, keys_SHCD: Tensor, values_SHCD: Tensor, lengths_S: Tensor, *, longest: int, even: bool, scale: float
) -> Tensor:
    """Each slot's query over the first `lengths` keys of its row, [S, Q, D].

    The query heads of a kv head stand where the queries of a sequence would, so keys are never repeated. `longest`
    and `even` (all lengths alike) are what the host knows, so that nothing beyond them is read or masked.
    """
    slots, q_heads, dim = queries_SQD.shape
    kv_heads = keys_SHCD.shape[1]
    queries_SHGD = queries_SQD.view(slots, kv_heads, q_heads // kv_heads, dim)
    mask = None
    if not even:
        mask = (torch.arange(longest, device=lengths_S.device) < lengths_S[:, None])[:, None, None]
    out_SHGD = F.scaled_dot_product_attention(
        queries_SHGD, keys_SHCD[:, :, :longest], values_SHCD[:, :, :longest], attn_mask=mask, scale=scale
    )
    return out_SHGD.reshape(slots, q_heads, dim)


def causal_attention(queries_BQTD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, *, scale: float) -> Tensor:
    """Whole sequences over themselves, [B, Q, T, D]."""
    return F.scaled_dot_product_attention(queries_BQTD, keys_BHTD, values_BHTD, is_causal=True, scale=scale, enable_gqa=True)


def shadow_attention(
    queries_1QTD: Tensor, keys_1HTD: Tensor, values_1HTD: Tensor, evicted_at_HT: Tensor, *, scale: float
) -> Tensor:
    """A whole sequence as the sampler saw it, [1, Q, T, D]: the query at t sees the key at j iff j <= t < evicted_at[j]."""
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
        tiles.append(
            F.scaled_dot_product_attention(
                queries_HGTD[:, :, start:stop], keys_HGTD[:, :, :stop], values_HGTD[:, :, :stop], attn_mask=sees, scale=scale
            )
        )
    return torch.cat(tiles, dim=2).reshape(1, q_heads, total, dim)
