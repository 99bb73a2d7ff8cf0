"""TriAttention's logits: the product of each key with a virtual query, and the weighted lengths of the key's pairs."""

# B rows, Q query heads, H kv heads, G query heads per kv head, T cached tokens, F pairs of dimensions

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, tl
from .rows import Rows


def fused_logits(virtual_BQF: Tensor, spread_BQF: Tensor, keys: Rows, pairs_BF2: Tensor) -> Tensor:
    """Compute `predicted_logits` [B, H, G, T] of `kv/policies/triattention.py` in one launch, which reads keys in place."""
    rows, heads, total, _ = keys.shape
    group, pairs = virtual_BQF.shape[1] // heads, virtual_BQF.shape[2]
    out = torch.empty(rows, heads, group, total, dtype=torch.float32, device=keys.device)
    block = 64
    _logits[(rows * heads, -(-total // block))](
        *(torch.view_as_real(virtual_BQF.contiguous()), spread_BQF.contiguous(), keys.stored_NHCD, keys.rows_R),
        *(pairs_BF2.contiguous(), *keys.strides, heads, total, out),
        GROUP=group,
        PAIRS=pairs,
        PAIRS_PAD=next_power_of_2(pairs),
        BLOCK=block,
        num_warps=4,
    )
    return out


@jit(do_not_specialize=["total"])  # prompts have many lengths
def _logits(
    virtual_ptr, spread_ptr, keys_ptr, rows_ptr, pairs_ptr, row_stride, head_stride, token_stride, heads, total, out_ptr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    n, f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PAIRS_PAD)
    in_pairs = f < PAIRS
    dims = pairs_ptr + (head // heads * PAIRS + f) * 2
    real_dim = tl.load(dims, mask=in_pairs, other=0)
    imaginary_dim = tl.load(dims + 1, mask=in_pairs, other=0)
    row = keys_ptr + tl.load(rows_ptr + head // heads) * row_stride + (head % heads) * head_stride
    tokens = row + n[:, None] * token_stride
    mask = (n < total)[:, None] & in_pairs[None, :]
    real = tl.load(tokens + real_dim[None, :], mask=mask, other=0.0).to(tl.float32)
    imaginary = tl.load(tokens + imaginary_dim[None, :], mask=mask, other=0.0).to(tl.float32)
    length = tl.sqrt(real * real + imaginary * imaginary)
    for g in range(GROUP):
        query = (head * GROUP + g) * PAIRS + f
        a = tl.load(virtual_ptr + 2 * query, mask=in_pairs, other=0.0)
        b = tl.load(virtual_ptr + 2 * query + 1, mask=in_pairs, other=0.0)
        weight = tl.load(spread_ptr + query, mask=in_pairs, other=0.0)
        logits = tl.sum(real * a[None, :] + imaginary * b[None, :] + length * weight[None, :], axis=1)
        tl.store(out_ptr + (head * GROUP + g) * total + n, logits, mask=n < total)
