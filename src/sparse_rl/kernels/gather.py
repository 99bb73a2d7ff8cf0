"""Compact cached rows in place: move kept tokens to the front, in order, without copying the row."""

# N cached rows, R compacted rows, H kv heads, C capacity, K kept tokens, D head dimension

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, tl, usable


def keep_in_place(keys_NHCD: Tensor, values_NHCD: Tensor, positions_NHC: Tensor, rows_R: Tensor, kept_RHK: Tensor) -> None:
    """Move token `kept[r, h, i]` of row `rows[r]` to index i. `kept` is ascending, so no token is overwritten before it is
    read."""
    if usable(keys_NHCD.device):
        fused_keep(keys_NHCD, values_NHCD, positions_NHC, rows_R, kept_RHK)
        return
    heads, capacity = keys_NHCD.shape[1:3]
    first_RH1 = ((rows_R[:, None] * heads + torch.arange(heads, device=rows_R.device)) * capacity)[..., None]
    to = (first_RH1 + torch.arange(kept_RHK.shape[2], device=rows_R.device)).flatten()
    source = (first_RH1 + kept_RHK).flatten()
    for tensor in (keys_NHCD.flatten(0, 2), values_NHCD.flatten(0, 2), positions_NHC.flatten()):
        tensor.index_copy_(0, to, tensor.index_select(0, source))


def fused_keep(keys_NHCD: Tensor, values_NHCD: Tensor, positions_NHC: Tensor, rows_R: Tensor, kept_RHK: Tensor) -> None:
    heads, capacity, dim = keys_NHCD.shape[1:]
    count, kept = len(rows_R), kept_RHK.shape[2]
    _keep[(count * heads,)](
        *(keys_NHCD, values_NHCD, positions_NHC, rows_R, kept_RHK.contiguous(), heads, capacity, kept),
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        BLOCK=64 if dim <= 128 else 32,
        num_warps=8,
    )


@jit
def _keep(
    keys_ptr, values_ptr, positions_ptr, rows_ptr, kept_ptr, heads, capacity, kept,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row = (tl.load(rows_ptr + pair // heads) * heads + pair % heads) * capacity
    d = tl.arange(0, DIM_PAD)
    for start in range(0, kept, BLOCK):
        to = start + tl.arange(0, BLOCK)
        source = tl.load(kept_ptr + pair * kept + to, mask=to < kept, other=0)
        mask = (to < kept)[:, None] & (d < DIM)[None, :]
        keys = tl.load(keys_ptr + (row + source)[:, None] * DIM + d[None, :], mask=mask)
        values = tl.load(values_ptr + (row + source)[:, None] * DIM + d[None, :], mask=mask)
        positions = tl.load(positions_ptr + row + source, mask=to < kept)
        tl.debug_barrier()  # read the whole block before writing any of it; later blocks read at larger indices
        tl.store(keys_ptr + (row + to)[:, None] * DIM + d[None, :], keys, mask=mask)
        tl.store(values_ptr + (row + to)[:, None] * DIM + d[None, :], values, mask=mask)
        tl.store(positions_ptr + row + to, positions, mask=to < kept)
