"""Compact cached rows in place: move kept tokens to the front, in order, without copying the row."""

# N cached rows, R compacted rows, H kv heads, C capacity, T held tokens, K kept and n = T - K dropped tokens, D head dimension,
# g steps of a token

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, tl, usable


def keep_in_place(
    keys_NHCD: Tensor,
    values_NHCD: Tensor,
    key_steps_NHCg: Tensor,
    value_steps_NHCg: Tensor,
    positions_NHC: Tensor,
    rows_R: Tensor,
    kept_RHK: Tensor,
    held: int,
) -> Tensor:
    """Move token `kept[r, h, i]` of row `rows[r]` to index i. Return the positions [R, H, n] of the dropped ones of its `held`
    tokens, in order.

    `kept` is ascending, so no token is overwritten before it is read. Without codes, the steps are empty.
    """
    moved = (keys_NHCD, values_NHCD, key_steps_NHCg, value_steps_NHCg, positions_NHC)
    if usable(keys_NHCD.device):
        return fused_keep(*moved, rows_R, kept_RHK, held)
    dropped_RHn = dropped_positions(positions_NHC[rows_R, :, :held], kept_RHK)
    heads, capacity = keys_NHCD.shape[1:3]
    first_RH1 = ((rows_R[:, None] * heads + torch.arange(heads, device=rows_R.device)) * capacity)[..., None]
    to = (first_RH1 + torch.arange(kept_RHK.shape[2], device=rows_R.device)).flatten()
    source = (first_RH1 + kept_RHK).flatten()
    for tensor in moved:
        flat = tensor.flatten(0, 2)
        flat.index_copy_(0, to, flat.index_select(0, source))
    return dropped_RHn


def dropped_positions(positions_RHT: Tensor, kept_RHK: Tensor) -> Tensor:
    """Return the positions that are not kept, ascending, as int32 [R, H, n].

    Before kept token k there are kept[k] - k dropped tokens. The number of kept tokens before the d-th dropped token is
    therefore the number of k whose count is at most d.
    """
    kept = kept_RHK.shape[2]
    before_RHK = kept_RHK - torch.arange(kept, device=kept_RHK.device)
    number_RHn = torch.arange(positions_RHT.shape[2] - kept, device=kept_RHK.device).expand(*kept_RHK.shape[:2], -1)
    index_RHn = number_RHn + torch.searchsorted(before_RHK, number_RHn.contiguous(), right=True)
    return positions_RHT.gather(2, index_RHn).to(torch.int32)


def fused_keep(
    keys_NHCD: Tensor,
    values_NHCD: Tensor,
    key_steps_NHCg: Tensor,
    value_steps_NHCg: Tensor,
    positions_NHC: Tensor,
    rows_R: Tensor,
    kept_RHK: Tensor,
    held: int,
) -> Tensor:
    heads, capacity, dim = keys_NHCD.shape[1:]
    count, kept, steps = len(rows_R), kept_RHK.shape[2], key_steps_NHCg.shape[3]
    scales = (key_steps_NHCg, value_steps_NHCg) if steps else (positions_NHC, positions_NHC)
    dropped = torch.empty(count, heads, held - kept, dtype=torch.int32, device=rows_R.device)
    _keep[(count * heads,)](
        *(keys_NHCD, values_NHCD, *scales, positions_NHC, rows_R, kept_RHK.contiguous(), dropped, heads, capacity, held, kept),
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        STEPS=steps,
        STEPS_PAD=next_power_of_2(max(1, steps)),
        BLOCK=64 if dim <= 128 else 32,
        num_warps=8,
    )
    return dropped


@jit
def _keep(
    keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr, positions_ptr, rows_ptr, kept_ptr, dropped_ptr,
    heads, capacity, held, kept,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row = (tl.load(rows_ptr + pair // heads) * heads + pair % heads) * capacity
    d, g = tl.arange(0, DIM_PAD), tl.arange(0, STEPS_PAD)
    for start in range(0, held - kept, BLOCK):  # as in `dropped_positions`
        number = start + tl.arange(0, BLOCK)
        before = tl.zeros([BLOCK], tl.int32)
        for first in range(0, kept, BLOCK):
            k = first + tl.arange(0, BLOCK)
            gap = tl.load(kept_ptr + pair * kept + k, mask=k < kept).to(tl.int32) - k
            gap = tl.where(k < kept, gap, held)  # padding comes before no dropped token
            before += tl.sum((gap[None, :] <= number[:, None]).to(tl.int32), axis=1)
        is_dropped = number < held - kept
        position = tl.load(positions_ptr + row + number + before, mask=is_dropped)
        tl.store(dropped_ptr + pair * (held - kept) + number, position, mask=is_dropped)
    for start in range(0, kept, BLOCK):
        to = start + tl.arange(0, BLOCK)
        source = tl.load(kept_ptr + pair * kept + to, mask=to < kept, other=0)
        mask = (to < kept)[:, None] & (d < DIM)[None, :]
        keys = tl.load(keys_ptr + (row + source)[:, None] * DIM + d[None, :], mask=mask)
        values = tl.load(values_ptr + (row + source)[:, None] * DIM + d[None, :], mask=mask)
        positions = tl.load(positions_ptr + row + source, mask=to < kept)
        if STEPS > 0:
            has_step = (to < kept)[:, None] & (g < STEPS)[None, :]
            key_steps = tl.load(key_steps_ptr + (row + source)[:, None] * STEPS + g[None, :], mask=has_step)
            value_steps = tl.load(value_steps_ptr + (row + source)[:, None] * STEPS + g[None, :], mask=has_step)
        tl.debug_barrier()  # read the whole block before writing any of it; later blocks read at larger indices
        tl.store(keys_ptr + (row + to)[:, None] * DIM + d[None, :], keys, mask=mask)
        tl.store(values_ptr + (row + to)[:, None] * DIM + d[None, :], values, mask=mask)
        tl.store(positions_ptr + row + to, positions, mask=to < kept)
        if STEPS > 0:
            tl.store(key_steps_ptr + (row + to)[:, None] * STEPS + g[None, :], key_steps, mask=has_step)
            tl.store(value_steps_ptr + (row + to)[:, None] * STEPS + g[None, :], value_steps, mask=has_step)
