"""R-KV's redundancy: the similarity of each key to the other keys of its row, without storing a [T, T] matrix."""

# B rows, H kv heads, T cached tokens, R rows of a tile of the similarity matrix, D head dimension

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, precision, product, tl, usable
from .rows import Rows

TILE_ROWS = 256  # rows of a tile of the similarity matrix, in the torch reference
UNIT = 2.0**-32
"""Unit in which the kernel adds up similarities."""


def redundancy(keys_BHTD: Tensor | Rows, threshold: float) -> Tensor:
    """Return the softmax over the T keys of each key's mean cosine similarity to all keys, [B, H, T].

    In each row of the similarity matrix, two entries are set to 0: the diagonal, and the LAST column above the threshold
    (column 0 if there is none). The newest of several similar keys therefore does not count as redundant.
    """
    if usable(keys_BHTD.device) and keys_BHTD.dtype != torch.float64:
        rows = keys_BHTD if isinstance(keys_BHTD, Rows) else Rows.of(keys_BHTD)
        sums_BHT = fused_sums(rows, threshold)
    else:
        sums_BHT = tiled_sums(keys_BHTD.take() if isinstance(keys_BHTD, Rows) else keys_BHTD, threshold)
    return (sums_BHT / keys_BHTD.shape[2]).softmax(dim=-1)


def tiled_sums(keys_BHTD: Tensor, threshold: float) -> Tensor:
    """Return the column sums of the similarity matrix, computed tile by tile. This is the torch reference."""
    keys = keys_BHTD.float()
    unit_BHTD = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    unit_BHDT = unit_BHTD.transpose(-1, -2).contiguous()  # contiguous, because many small products then run faster on a CPU
    total = keys.shape[2]
    column_T = torch.arange(total, device=keys.device)
    sums_BHT = keys.new_zeros(keys.shape[:3])
    for start in range(0, total, TILE_ROWS):
        rows = column_T[start : start + TILE_ROWS]
        similarity_BHRT = unit_BHTD[:, :, start : start + TILE_ROWS] @ unit_BHDT
        similarity_BHRT[:, :, rows - start, rows] = 0
        above_BHRT = similarity_BHRT > threshold
        from_end_BHR1 = above_BHRT.flip(-1).view(torch.uint8).argmax(dim=-1, keepdim=True)
        last_BHR1 = torch.where(above_BHRT.any(dim=-1, keepdim=True), total - 1 - from_end_BHR1, 0)
        similarity_BHRT.scatter_(-1, last_BHR1, 0)
        sums_BHT += similarity_BHRT.sum(dim=-2)
    return sums_BHT


def fused_sums(keys: Rows, threshold: float) -> Tensor:
    """Compute `tiled_sums` in two launches. The matrix is symmetric, so a column's sum equals the row's sum minus the entries
    set to 0.

    These entries are added as integers, in units of `UNIT`. Integer sums do not depend on the order of the additions, so results
    are bitwise reproducible.
    """
    rows, heads, total, dim = keys.shape
    norms, sums = torch.empty(2, rows, heads, total, dtype=torch.float32, device=keys.device)
    lost = torch.zeros(rows, heads, total, dtype=torch.int64, device=keys.device)
    block, columns = (64, 128) if dim <= 128 and keys.dtype != torch.float32 else (32, 32)  # the fastest of 10 on an H200
    where = (keys.stored_NHCD, keys.rows_R, *keys.strides, heads, total)
    dim_pad = max(16, next_power_of_2(dim))
    _norms[(rows * heads, -(-total // 64))](*where, norms, DIM=dim, DIM_PAD=dim_pad, BLOCK=64, num_warps=4)
    _similarities[(rows * heads, -(-total // block))](
        *(*where, norms, threshold, sums, lost),
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=block,
        COLUMNS=columns,
        UNIT=UNIT,
        PRECISION=precision(keys.stored_NHCD),
        num_warps=4,
    )
    return torch.sub(sums, lost, alpha=UNIT)


@jit(do_not_specialize=["total"])  # prompts have many lengths
def _norms(
    keys_ptr, rows_ptr, row_stride, head_stride, token_stride, heads, total, norms_ptr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    i, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM_PAD)
    row = keys_ptr + tl.load(rows_ptr + pair // heads) * row_stride + (pair % heads) * head_stride
    mask = (i < total)[:, None] & (d < DIM)[None, :]
    keys = tl.load(row + i[:, None] * token_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(norms_ptr + pair * total + i, tl.sqrt(tl.sum(keys * keys, axis=1)) + 1e-8, mask=i < total)


@jit(do_not_specialize=["total"])  # prompts have many lengths
def _similarities(
    keys_ptr, rows_ptr, row_stride, head_stride, token_stride, heads, total, norms_ptr, threshold,
    sums_ptr, lost_ptr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    i, d = first + tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    row = keys_ptr + tl.load(rows_ptr + pair // heads) * row_stride + (pair % heads) * head_stride
    in_dim = (d < DIM)[None, :]
    norms_ptr += pair * total
    mine = tl.load(row + i[:, None] * token_stride + d[None, :], mask=(i < total)[:, None] & in_dim, other=0.0)
    my_norm = tl.load(norms_ptr + i, mask=i < total, other=1.0)
    sums = tl.zeros([ROWS], tl.float32)
    zeroed = tl.full([ROWS], -1, tl.int32)
    for start in range(0, total, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other = tl.load(row + j[:, None] * token_stride + d[None, :], mask=(j < total)[:, None] & in_dim, other=0.0)
        scale = 1.0 / tl.load(norms_ptr + j, mask=j < total, other=1.0)
        similar = product(mine, tl.trans(other), PRECISION) * scale[None, :]  # still to be multiplied by my_norm
        if (start < first + ROWS) & (start + COLUMNS > first):
            similar = tl.where(i[:, None] == j[None, :], 0.0, similar)
        sums += tl.sum(similar, axis=1)
        real = tl.where(j < total, j, -1)
        last = tl.max(tl.where(similar > (threshold * my_norm)[:, None], real[None, :], -1), axis=1)
        zeroed = tl.maximum(zeroed, last)
    zeroed = tl.maximum(zeroed, 0)
    lost = tl.load(row + zeroed[:, None] * token_stride + d[None, :], mask=in_dim, other=0.0).to(tl.float32)
    amount = tl.sum(mine.to(tl.float32) * lost, axis=1) / tl.load(norms_ptr + zeroed)
    amount = tl.where(zeroed == i, 0.0, amount / my_norm)  # the diagonal is already 0
    tl.store(sums_ptr + pair * total + i, sums / my_norm, mask=i < total)
    tl.atomic_add(lost_ptr + pair * total + zeroed, (amount / UNIT).to(tl.int64), mask=i < total, sem="relaxed")
