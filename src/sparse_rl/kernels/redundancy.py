"""R-KV's redundancy: the similarity of each key to the other keys of its row, without storing a [T, T] matrix."""

# B rows, H kv heads, T cached tokens, R rows of a tile of the similarity matrix, D head dimension

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, precision, product, tl, usable
from .rows import Rows

TILE_ROWS = 256  # rows of a tile of the similarity matrix, in the torch reference


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
    """Compute `tiled_sums` in three launches. The matrix is symmetric, so a column's sum equals the row's sum minus the
    entries set to 0."""
    rows, heads, total, dim = keys.shape
    sums = torch.empty(rows, heads, total, dtype=torch.float32, device=keys.device)
    norms, amounts, result = (torch.empty_like(sums) for _ in range(3))
    zeroed = torch.empty_like(sums, dtype=torch.int32)
    block, columns = (64, 128) if dim <= 128 and keys.dtype != torch.float32 else (32, 32)  # the fastest of 10 on an H200
    where = (keys.stored_NHCD, keys.rows_R, *keys.strides, heads, total)
    dim_pad = max(16, next_power_of_2(dim))
    _norms[(rows * heads, -(-total // 64))](*where, norms, DIM=dim, DIM_PAD=dim_pad, BLOCK=64, num_warps=4)
    _similarities[(rows * heads, -(-total // block))](
        *(*where, norms, threshold, sums, zeroed, amounts),
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=block,
        COLUMNS=columns,
        PRECISION=precision(keys.stored_NHCD),
        num_warps=4,
    )
    _subtract[(rows * heads, -(-total // 64))](sums, zeroed, amounts, result, total, BLOCK=64, num_warps=4)
    return result


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
    sums_ptr, zeroed_ptr, amounts_ptr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
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
    amount = tl.where(zeroed == i, 0.0, amount)  # the diagonal is already 0
    place = pair * total + i
    tl.store(sums_ptr + place, sums / my_norm, mask=i < total)
    tl.store(zeroed_ptr + place, zeroed, mask=i < total)
    tl.store(amounts_ptr + place, amount / my_norm, mask=i < total)


@jit(do_not_specialize=["total"])
def _subtract(sums_ptr, zeroed_ptr, amounts_ptr, result_ptr, total, BLOCK: tl.constexpr):
    """Subtract from column j the entries that rows set to 0 in it. The order is fixed and no atomics are used, so that results
    are bitwise reproducible."""
    pair = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lost = tl.zeros([BLOCK], tl.float32)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        zeroed = tl.load(zeroed_ptr + pair * total + i, mask=i < total, other=-1)
        amount = tl.load(amounts_ptr + pair * total + i, mask=i < total, other=0.0)
        lost += tl.sum(tl.where(zeroed[:, None] == j[None, :], amount[:, None], 0.0), axis=0)
    sums = tl.load(sums_ptr + pair * total + j, mask=j < total, other=0.0)
    tl.store(result_ptr + pair * total + j, sums - lost, mask=j < total)
