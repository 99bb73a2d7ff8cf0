"""Form of a layer's attention beyond scaled dot products: a sliding window, soft-capped logits and learned sinks.

`masked_attention` is the torch reference of every form. It runs where no fused kernel supports the form.
"""

# B rows, Q query heads, H kv heads, G query heads per kv head, T queries, M keys, D head dimension

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MASK_TILE = 512
"""Queries per tile. The mask of a tile is [tile, M]."""


@dataclass(frozen=True, eq=False)
class AttentionForm:
    window: int | None = None
    """Number of tokens that a query sees: itself and those before it; None for all."""
    softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap)."""
    sinks_Q: Tensor | None = None
    """One learned logit per query head. It takes part in the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """True if the weights are a softmax of scaled dot products, within a window or not."""
        return self.softcap is None and self.sinks_Q is None

    def within(self, tokens: int) -> "AttentionForm":
        """Return the form for sequences of at most `tokens` tokens, without a window that hides none of them."""
        hides = self.window is not None and self.window < tokens
        return self if hides or self.window is None else AttentionForm(None, self.softcap, self.sinks_Q)


PLAIN = AttentionForm()


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def masked_attention(
    queries_BQTD: Tensor, keys_BHMD: Tensor, values_BHMD: Tensor, sees: Tensor | None, scale: float, form: AttentionForm
) -> Tensor:
    """Return the attention output [B, Q, T, D]. It is differentiable. `sees` is boolean and broadcasts to [B, H, G, T, M];
    `form.window` is not applied in addition to it."""
    heads = keys_BHMD.shape[1]
    if form.is_plain:
        mask = None if sees is None else _of_query_heads(sees, queries_BQTD.shape[1], heads)
        grouped = queries_BQTD.shape[1] > heads
        return F.scaled_dot_product_attention(
            queries_BQTD, keys_BHMD, values_BHMD, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    wide = torch.promote_types(queries_BQTD.dtype, torch.float32)
    queries_BHGTD, keys_BH1MD, values_BH1MD = (
        queries_BQTD.to(wide).unflatten(1, (heads, -1)),
        keys_BHMD.to(wide)[:, :, None],
        values_BHMD.to(wide)[:, :, None],
    )
    logits = capped(queries_BHGTD @ keys_BH1MD.transpose(-1, -2) * scale, form.softcap)
    if sees is not None:
        logits = logits.masked_fill(~sees, -torch.inf)
    sums = logits.logsumexp(dim=-1, keepdim=True)
    if form.sinks_Q is not None:
        sums = torch.logaddexp(sums, form.sinks_Q.to(wide).view(1, heads, -1, 1, 1))
    return ((logits - sums).exp() @ values_BH1MD).flatten(1, 2).to(queries_BQTD.dtype)


def _of_query_heads(sees: Tensor, q_heads: int, kv_heads: int) -> Tensor:
    """Return the mask [B, Q, T, M] of a mask [B, H, G, T, M] of which H and G may be 1."""
    if sees.dim() < 5:
        return sees
    if sees.shape[1] == sees.shape[2] == 1:
        return sees.flatten(1, 2)
    return sees.expand(-1, kv_heads, q_heads // kv_heads, -1, -1).flatten(1, 2)


def last_tokens_masked(
    queries_BQnD: Tensor, keys_BHmD: Tensor, values_BHmD: Tensor, scale: float, form: AttentionForm
) -> Tensor:
    """Return the causal attention output [B, Q, n, D] of the last n of m tokens, within the window. Works in tiles of queries,
    which read no keys before the window of their first query."""
    n, m = queries_BQnD.shape[2], keys_BHmD.shape[2]
    tiles = []
    for start in range(0, n, MASK_TILE):
        stop = min(start + MASK_TILE, n)
        times_n = torch.arange(m - n + start, m - n + stop, device=keys_BHmD.device)[:, None]
        last = m - n + stop
        first = 0 if form.window is None else max(0, m - n + start - form.window + 1)
        keys_m = torch.arange(first, last, device=keys_BHmD.device)
        sees_nm = keys_m <= times_n
        if form.window is not None:
            sees_nm = sees_nm & (keys_m > times_n - form.window)
        part = (queries_BQnD[:, :, start:stop], keys_BHmD[:, :, first:last], values_BHmD[:, :, first:last])
        tiles.append(masked_attention(*part, sees_nm, scale, form))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)
