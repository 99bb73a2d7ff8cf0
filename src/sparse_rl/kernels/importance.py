"""Attention importance of keys for the queries of the window, used by R-KV and SnapKV."""

# B rows, Q query heads, H kv heads, G query heads per kv head, W queries of the window, T cached tokens, n = T - W

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, precision, product, tl, usable
from .rows import Rows

QUERY_ROWS = 128
"""Number of queries of 128 half-precision elements that a program holds in 100 KB of shared memory, next to the keys it
reads."""


def window_logits(queries_BQWD: Tensor, keys_BHTD: Tensor) -> Tensor:
    """Return QK^T / sqrt(D) as float32 [B, H, G, W, T]; query head h belongs to kv head h // G."""
    rows, q_heads, window, dim = queries_BQWD.shape
    heads = keys_BHTD.shape[1]
    queries_BHGWD = queries_BQWD.float().view(rows, heads, q_heads // heads, window, dim)
    return queries_BHGWD @ keys_BHTD.float()[:, :, None].transpose(-1, -2) / dim**0.5


def causal_window_logits(queries_BQWD: Tensor, keys_BHTD: Tensor) -> Tensor:
    """Return `window_logits` over all T keys. Keys after a query of the window are masked."""
    logits_BHGWT = window_logits(queries_BQWD, keys_BHTD)
    window, total = logits_BHGWT.shape[-2:]
    key_T = torch.arange(total, device=keys_BHTD.device)
    query_W = torch.arange(total - window, total, device=keys_BHTD.device)
    return logits_BHGWT.masked_fill(key_T > query_W[:, None], -torch.inf)


def decode_importance(queries_BQWD: Tensor, keys_BHTD: Tensor | Rows) -> Tensor:
    """Return R-KV's attention score before pooling, [B, H, T - W].

    The function takes the maximum of the logits over the query heads of a group, then the softmax over the keys before the
    window, and then the mean over the queries of the window.
    """
    if usable(keys_BHTD.device) and keys_BHTD.dtype != torch.float64:
        return fused_importance(queries_BQWD, keys_BHTD if isinstance(keys_BHTD, Rows) else Rows.of(keys_BHTD))
    keys_BHTD = keys_BHTD.take() if isinstance(keys_BHTD, Rows) else keys_BHTD
    window = queries_BQWD.shape[2]
    logits_BHWn = window_logits(queries_BQWD, keys_BHTD[:, :, : keys_BHTD.shape[2] - window]).amax(dim=2)
    return logits_BHWn.softmax(dim=-1).mean(dim=-2)


def fused_importance(queries_BQWD: Tensor, keys: Rows) -> Tensor:
    """Compute `decode_importance` in one launch that reads a row's keys twice. A long window is split into parts whose queries
    fit in shared memory."""
    rows, q_heads, window, dim = queries_BQWD.shape
    heads, scored = keys.shape[1], keys.held - window
    group = q_heads // heads
    part = max(1, QUERY_ROWS * (1 if dim <= 128 else 128 / dim) * 2 / keys.dtype.itemsize // next_power_of_2(group))
    out = torch.zeros(rows, heads, scored, dtype=torch.float32, device=keys.device)
    for queries in queries_BQWD.split(int(part), dim=2):
        queries = queries.contiguous()
        window_pad = next_power_of_2(queries.shape[2])
        group_pad = max(next_power_of_2(group), 16 // window_pad)
        _importance[(rows * heads,)](
            *(queries, keys.stored_NHCD, keys.rows_R, *keys.strides, heads, scored, 1 / dim**0.5, window, out),
            GROUP=group,
            GROUP_PAD=group_pad,
            WINDOW=queries.shape[2],
            WINDOW_PAD=window_pad,
            DIM=dim,
            DIM_PAD=max(16, next_power_of_2(dim)),
            BLOCK=max(16, min(64 if dim <= 256 else 32, 8192 // (group_pad * window_pad))),
            PRECISION=precision(keys.stored_NHCD),
            num_warps=4,
        )
    return out


@jit
def _window_block(
    query, row, token_stride, start, scored, scale,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, WINDOW_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the logits of a block of keys, maximized over the group, as [WINDOW_PAD, BLOCK]."""
    n, d = start + tl.arange(0, BLOCK), tl.arange(0, DIM_PAD)
    keys = tl.load(row + n[:, None] * token_stride + d[None, :], mask=(n < scored)[:, None] & (d < DIM)[None, :], other=0.0)
    logits = product(query, tl.trans(keys), PRECISION) * scale
    logits = tl.reshape(logits, [WINDOW_PAD, GROUP_PAD, BLOCK])
    in_group = (tl.arange(0, GROUP_PAD) < GROUP)[None, :, None]
    logits = tl.max(tl.where(in_group, logits, float("-inf")), axis=1)
    return tl.where((n < scored)[None, :], logits, float("-inf"))


@jit(do_not_specialize=["scored"])  # prompts have many lengths
def _importance(
    queries_ptr, keys_ptr, rows_ptr, row_stride, head_stride, token_stride, heads, scored, scale, window, out_ptr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, WINDOW: tl.constexpr, WINDOW_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    r, d = tl.arange(0, WINDOW_PAD * GROUP_PAD), tl.arange(0, DIM_PAD)
    w, g = r // GROUP_PAD, r % GROUP_PAD
    places = ((pair * GROUP + g)[:, None] * WINDOW + w[:, None]) * DIM + d[None, :]
    real = ((w < WINDOW) & (g < GROUP))[:, None] & (d < DIM)[None, :]
    query = tl.load(queries_ptr + places, mask=real, other=0.0)
    row = keys_ptr + tl.load(rows_ptr + pair // heads) * row_stride + (pair % heads) * head_stride
    top = tl.full([WINDOW_PAD], float("-inf"), tl.float32)
    total = tl.zeros([WINDOW_PAD], tl.float32)
    for start in range(0, scored, BLOCK):
        logits = _window_block(
            query, row, token_stride, start, scored, scale, GROUP, GROUP_PAD, WINDOW_PAD, DIM, DIM_PAD, BLOCK, PRECISION
        )
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(logits - new_top[:, None]), axis=1)
        top = new_top
    in_window = (tl.arange(0, WINDOW_PAD) < WINDOW)[:, None]
    for start in range(0, scored, BLOCK):
        logits = _window_block(
            query, row, token_stride, start, scored, scale, GROUP, GROUP_PAD, WINDOW_PAD, DIM, DIM_PAD, BLOCK, PRECISION
        )
        weights = tl.where(in_window, tl.exp(logits - top[:, None]) / total[:, None], 0.0)
        n = start + tl.arange(0, BLOCK)
        place = out_ptr + pair * scored + n
        before = tl.load(place, mask=n < scored, other=0.0)
        tl.store(place, before + tl.sum(weights, axis=0) / window, mask=n < scored)
