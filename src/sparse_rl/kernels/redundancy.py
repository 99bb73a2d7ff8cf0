"""R-KV's redundancy: how much each key repeats the other keys of its row, without a [T, T] matrix in memory."""

# B rows, H kv heads, T cached tokens, R rows of a tile of the similarity matrix, D head dimension

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, precision, product, tl, usable

TILE_ROWS = 256  # of the similarity matrix, in the reference


def redundancy(keys_BHTD: Tensor, threshold: float) -> Tensor:
    """Softmax over the T keys of each key's mean cosine similarity to all keys, [B, H, T].

    In each row of the similarity matrix the diagonal counts 0, and so does the LAST column above the threshold
    (column 0 if there is none): of several similar keys the newest is not held to be redundant.
    """
    sums = fused_sums if usable(keys_BHTD.device) and keys_BHTD.dtype != torch.float64 else tiled_sums
    return (sums(keys_BHTD, threshold) / keys_BHTD.shape[2]).softmax(dim=-1)


def tiled_sums(keys_BHTD: Tensor, threshold: float) -> Tensor:
    """The reference: column sums of the similarity matrix, tile by tile."""
    keys = keys_BHTD.float()
    unit_BHTD = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    unit_BHDT = unit_BHTD.transpose(-1, -2).contiguous()  # many small products on a CPU run faster on it
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


def fused_sums(keys_BHTD: Tensor, threshold: float) -> Tensor:
    """The same in two launches. The matrix is symmetric: a row's sum is its column's, less the entries set to 0."""
    rows, heads, total, dim = keys_BHTD.shape
    keys = keys_BHTD if keys_BHTD.stride(-1) == 1 else keys_BHTD.contiguous()
    sums = torch.empty(rows, heads, total, dtype=torch.float32, device=keys.device)
    zeroed, amounts, result = torch.empty_like(sums, dtype=torch.int32), torch.empty_like(sums), torch.empty_like(sums)
    block = 128 if dim <= 128 and keys.dtype != torch.float32 else 32
    _similarities[(rows * heads, -(-total // block))](
        *(keys, keys.stride(0), keys.stride(1), keys.stride(2), heads, total, threshold, sums, zeroed, amounts),
        DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)),
        ROWS=block,
        COLUMNS=64 if block == 128 else block,
        PRECISION=precision(keys),
        num_warps=8 if block == 128 else 4,
    )
    _subtract[(rows * heads, -(-total // 64))](sums, zeroed, amounts, result, total, BLOCK=64, num_warps=4)
    return result


@jit
def _similarities(
    keys_ptr, row_stride, head_stride, token_stride, heads, total, threshold, sums_ptr, zeroed_ptr, amounts_ptr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    i, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    row = keys_ptr + (pair // heads) * row_stride + (pair % heads) * head_stride
    mine = tl.load(row + i[:, None] * token_stride + d[None, :], mask=(i < total)[:, None] & (d < DIM)[None, :], other=0.0)
    wide = mine.to(tl.float32)
    my_scale = 1.0 / (tl.sqrt(tl.sum(wide * wide, axis=1)) + 1e-8)
    sums = tl.zeros([ROWS], tl.float32)
    first = tl.zeros([ROWS], tl.float32)
    amount = tl.zeros([ROWS], tl.float32)
    zeroed = tl.full([ROWS], -1, tl.int32)
    for start in range(0, total, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other = tl.load(
            row + j[:, None] * token_stride + d[None, :], mask=(j < total)[:, None] & (d < DIM)[None, :], other=0.0
        )
        other_wide = other.to(tl.float32)
        scale = 1.0 / (tl.sqrt(tl.sum(other_wide * other_wide, axis=1)) + 1e-8)
        similar = product(mine, tl.trans(other), PRECISION) * my_scale[:, None] * scale[None, :]
        inside = (j < total)[None, :]
        similar = tl.where(inside & (i[:, None] != j[None, :]), similar, 0.0)
        sums += tl.sum(similar, axis=1)
        last = tl.max(tl.where(inside & (similar > threshold), j[None, :], -1), axis=1)
        at_last = tl.sum(tl.where(j[None, :] == last[:, None], similar, 0.0), axis=1)
        first += tl.sum(tl.where(j[None, :] == 0, similar, 0.0), axis=1)
        amount = tl.where(last >= 0, at_last, amount)
        zeroed = tl.maximum(zeroed, last)
    amount = tl.where(zeroed < 0, first, amount)
    place = pair * total + i
    tl.store(sums_ptr + place, sums, mask=i < total)
    tl.store(zeroed_ptr + place, tl.maximum(zeroed, 0), mask=i < total)
    tl.store(amounts_ptr + place, amount, mask=i < total)


@jit
def _subtract(sums_ptr, zeroed_ptr, amounts_ptr, result_ptr, total, BLOCK: tl.constexpr):
    """Column j loses the entries that the rows set to 0 in it, in a fixed order: no atomics, the same bits every time."""
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
