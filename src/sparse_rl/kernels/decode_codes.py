"""Decode 8-bit or 4-bit codes of keys or values in one launch. The torch reference is `kv.quantize.Scheme.restore`."""

# B rows, H kv heads, T tokens, D head dimension, d bytes of codes and g steps of a token in one head; rows: see rows.py

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, on, tl
from .rows import Rows

BLOCK = 32
"""Tokens of one program."""


def fused_decode(
    codes_BHTd: Tensor | Rows,
    steps_BHTg: Tensor | Rows,
    step_xHD: Tensor | None,
    centre_xHD: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return code * token step * channel step + centre as [B, H, T, D]. Channel step and centre may be absent.

    The static scales [H, D] are those of all rows, or [B, H, D] of each.
    """
    codes, steps = (each if isinstance(each, Rows) else Rows.of(each) for each in (codes_BHTd, steps_BHTg))
    rows, heads, tokens, width = codes.shape
    dim = width if codes.dtype == torch.int8 else 2 * width
    out = torch.empty(rows, heads, tokens, dim, dtype=dtype, device=codes.device)
    if out.numel():
        step, centre = (out if each is None else each.contiguous() for each in (step_xHD, centre_xHD))
        with on(codes.device):  # replay does not set the current device
            _decode[(rows * heads, -(-tokens // BLOCK))](
                *(codes.stored_NHCD, steps.stored_NHCD, codes.rows_R, *codes.strides, *steps.strides),
                *(step, centre, out, heads, tokens),
                BITS=8 if width == dim else 4,
                HALF=dim // 2,
                HALF_PAD=next_power_of_2(dim // 2),
                STEPS=steps.shape[3],
                OF_ROW=step_xHD is not None and step_xHD.dim() == 3,
                SCALED=step_xHD is not None,
                CENTRED=centre_xHD is not None,
                BLOCK=BLOCK,
                num_warps=4,
            )
    return out


@jit
def _decode(
    codes_ptr, steps_ptr, rows_ptr, codes_row, codes_head, codes_token, steps_row, steps_head, steps_token,
    step_ptr, centre_ptr, out_ptr, heads, tokens,
    BITS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, STEPS: tl.constexpr,
    OF_ROW: tl.constexpr, SCALED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    n, h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HALF_PAD)
    mask = (n < tokens)[:, None] & (h < HALF)[None, :]
    row, head = tl.load(rows_ptr + pair // heads), pair % heads
    of_codes = codes_ptr + row * codes_row + head * codes_head + n[:, None] * codes_token
    of_steps = steps_ptr + row * steps_row + head * steps_head + n[:, None] * steps_token
    if BITS == 8:
        places = of_codes + h[None, :]
        low = tl.load(places, mask=mask, other=0).to(tl.float32)
        high = tl.load(places + HALF, mask=mask, other=0).to(tl.float32)
    else:
        byte = tl.load(of_codes + h[None, :], mask=mask, other=136)
        low, high = (byte & 15).to(tl.float32) - 8.0, (byte >> 4).to(tl.float32) - 8.0
    channels: tl.constexpr = 2 * HALF // STEPS
    low *= tl.load(of_steps + h[None, :] // channels, mask=mask, other=0.0).to(tl.float32)
    high *= tl.load(of_steps + (h[None, :] + HALF) // channels, mask=mask, other=0.0).to(tl.float32)
    of_head = pair if OF_ROW else head
    channel = of_head * (2 * HALF) + h
    if SCALED:
        low *= tl.load(step_ptr + channel, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
        high *= tl.load(step_ptr + channel + HALF, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
    if CENTRED:
        low += tl.load(centre_ptr + channel, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
        high += tl.load(centre_ptr + channel + HALF, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + (pair * tokens + n)[:, None] * (2 * HALF) + h[None, :]
    tl.store(out, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HALF, high.to(out_ptr.dtype.element_ty), mask=mask)
