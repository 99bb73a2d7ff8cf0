"""One decode step of one layer over a cache of 8-bit or 4-bit codes, in one launch: encode and store the new key and value, store
the query, and attend over the stored prompt and the slot.

The torch reference is `SlotCache.append`, `SlotCache.read` and `attention.decode_attention`, or `attention.prompt_attention` and
`attention_part` with a prompt store. A program works as in `slot_attention.py`, but reads codes. The query is multiplied by the
channel steps once. A logit is then a product with codes times the token's step. The centre of keys is left out, because it adds
the same number to all logits of a query. The head is processed in two halves, since a byte holds a 4-bit code of each.
"""

# S slots, Q query heads, H kv heads, G query heads per kv head or steps of a token, C capacity, D head dimension, W window, d
# bytes of a token's codes in one head; in stored prompts: N pages of the pool, T tokens of a page, P pages of the longest prompt

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, precision, product, tl
from .rows import StoredCodes
from .slot_attention import BLOCK, _combine, _rows


def attend_and_append_codes(
    queries_SQD: Tensor,
    keys_SHD: Tensor,
    values_SHD: Tensor,
    cached: tuple[Tensor, Tensor, Tensor, Tensor],
    positions_SHC: Tensor,
    ring_SQWD: Tensor,
    lengths_S: Tensor,
    next_positions_S: Tensor,
    centre_HD: Tensor,
    step_HD: Tensor,
    *,
    scale: float,
    splits: int = 1,
    prompts: StoredCodes | None = None,
) -> Tensor:
    """Return the attention output [S, Q, D] of each slot's query over its prompt, its first `lengths` keys and the new key.

    `cached` are the codes of keys and of values [S, H, C, d], and the steps of both [S, H, C, G]. `centre` and `step` are the
    static scales of the channels of keys. The function writes the cache, the positions and the ring buffer in place. The caller
    increments the lengths at the end of the step.
    """
    slots, q_heads, dim = queries_SQD.shape
    kv_heads, capacity, width = cached[0].shape[1:]
    steps = cached[2].shape[3]
    group, window, half = q_heads // kv_heads, ring_SQWD.shape[2], dim // 2
    queries, keys, values = (_rows(tensor) for tensor in (queries_SQD, keys_SHD, values_SHD))
    out = torch.empty(slots, q_heads, dim, dtype=queries.dtype, device=queries.device)
    parts = out
    marks = out
    if splits > 1:
        parts = torch.empty(slots, q_heads, splits, dim, dtype=torch.float32, device=out.device)
        marks = torch.empty(slots, q_heads, splits, 2, dtype=torch.float32, device=out.device)
    block = BLOCK if dim <= 128 and splits > 1 else BLOCK // 2
    stored, table, pages_slot, page = cached, (lengths_S, lengths_S), 0, block
    if prompts is not None:
        stored, table = prompts.stored, (prompts.pages_SP, prompts.lengths_S)
        pages_slot, page = prompts.pages_SP.stride(0), prompts.stored[0].shape[2]
    half_pad = max(16, next_power_of_2(half))
    _attend[(slots, kv_heads, splits)](
        *(queries, keys, values, *cached, positions_SHC, ring_SQWD, *stored, *table, pages_slot),
        *(lengths_S, next_positions_S, centre_HD, step_HD, out, parts, marks, scale),
        *(queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), capacity),
        BITS=8 if width == dim else 4,
        GROUP=group,
        GROUP_PAD=max(16, next_power_of_2(group)),
        HEADS=kv_heads,
        HALF=half,
        HALF_PAD=half_pad,
        WIDTH=width,
        STEPS=steps,
        STEPS_PAD=1 if steps == 1 else half_pad * steps // dim,
        WINDOW=window,
        SPLITS=splits,
        STORED=prompts is not None,
        PAGE=page,
        BLOCK=block,
        PRECISION=precision(queries),
        num_warps=4 if splits > 1 else 2,
        num_stages=3 if splits == 1 else 2,
    )
    if splits > 1:
        _combine[(slots, q_heads)](
            *(parts, marks, out),
            HEADS=q_heads,
            DIM=dim,
            DIM_PAD=next_power_of_2(dim),
            SPLITS=splits,
            SPLITS_PAD=next_power_of_2(splits),
            num_warps=1,
        )
    return out


# Codes of one token: x are the two halves of its values


@jit
def _rounded(x):
    """Round to the nearest integer, halves to even, as torch does. The sum has no bits after the point."""
    return (x + 12582912.0) - 12582912.0


@jit
def _spread(steps, ROWS: tl.constexpr, STEPS_PAD: tl.constexpr, HALF_PAD: tl.constexpr):
    """Return the step of each channel of a half, [ROWS, HALF_PAD], from those of its groups, [ROWS, STEPS_PAD]."""
    wide = tl.broadcast_to(steps[:, :, None], [ROWS, STEPS_PAD, HALF_PAD // STEPS_PAD])
    return tl.reshape(wide, [ROWS, HALF_PAD])


@jit
def _group_steps(x, STEPS_PAD: tl.constexpr, HALF_PAD: tl.constexpr):
    """Return the 4-bit steps [STEPS_PAD] of a half: the value of largest magnitude of each group gets the code -8."""
    grouped = tl.reshape(x, [STEPS_PAD, HALF_PAD // STEPS_PAD])
    high, low = tl.max(grouped, axis=1), tl.min(grouped, axis=1)
    step = tl.where(high > -low, high, low) / -8.0
    step = tl.minimum(tl.maximum(step, -65504.0), 65504.0).to(tl.float16)
    return tl.where(step == 0.0, 5.9604644775390625e-08, step.to(tl.float32))


@jit
def _encode(
    low, high, codes_ptr, steps_ptr, stores, h, in_half,
    BITS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr,
):  # fmt: skip
    """Store the codes and steps of one token. Return the two halves of its values as they are stored."""
    if BITS == 8:
        largest = tl.maximum(tl.max(tl.abs(low), axis=0), tl.max(tl.abs(high), axis=0))
        step = tl.minimum(tl.div_rn(largest, 127.0), 65504.0).to(tl.float16).to(tl.float32)
        step = tl.where(step == 0.0, 5.9604644775390625e-08, step)
        low = tl.minimum(tl.maximum(_rounded(tl.div_rn(low, step)), -128.0), 127.0)
        high = tl.minimum(tl.maximum(_rounded(tl.div_rn(high, step)), -128.0), 127.0)
        if stores:
            tl.store(codes_ptr + h, low.to(tl.int8), mask=in_half)
            tl.store(codes_ptr + HALF + h, high.to(tl.int8), mask=in_half)
            tl.store(steps_ptr, step.to(tl.float16))
        return low * step, high * step
    else:
        g = tl.arange(0, STEPS_PAD)
        low_steps, high_steps = _group_steps(low, STEPS_PAD, HALF_PAD), _group_steps(high, STEPS_PAD, HALF_PAD)
        low_step = tl.reshape(_spread(low_steps[None, :], 1, STEPS_PAD, HALF_PAD), [HALF_PAD])
        high_step = tl.reshape(_spread(high_steps[None, :], 1, STEPS_PAD, HALF_PAD), [HALF_PAD])
        low = tl.minimum(tl.maximum(_rounded(tl.div_rn(low, low_step)), -8.0), 7.0)
        high = tl.minimum(tl.maximum(_rounded(tl.div_rn(high, high_step)), -8.0), 7.0)
        if stores:
            byte = (low + 8.0).to(tl.int32) | ((high + 8.0).to(tl.int32) << 4)
            tl.store(codes_ptr + h, byte.to(tl.uint8), mask=in_half)
            tl.store(steps_ptr + g, low_steps.to(tl.float16), mask=g < STEPS // 2)
            tl.store(steps_ptr + STEPS // 2 + g, high_steps.to(tl.float16), mask=g < STEPS // 2)
        return low * low_step, high * high_step


# Codes of a block of tokens


@jit
def _load(
    codes_ptr, steps_ptr, tokens, held, h, in_half, TYPE: tl.constexpr,
    BITS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, WIDTH: tl.constexpr,
    STEPS: tl.constexpr, STEPS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return two halves [BLOCK, HALF_PAD] and the factor [BLOCK] that both are still to be multiplied by.

    8-bit codes are returned as they are: they are exact in half precision. 4-bit codes are multiplied by their steps.
    """
    mask = held[:, None] & in_half[None, :]
    places = tokens[:, None] * WIDTH + h[None, :]
    if BITS == 8:
        low = tl.load(codes_ptr + places, mask=mask, other=0).to(tl.float32).to(TYPE)
        high = tl.load(codes_ptr + places + HALF, mask=mask, other=0).to(tl.float32).to(TYPE)
        return low, high, tl.load(steps_ptr + tokens, mask=held, other=0.0).to(tl.float32)
    else:
        byte = tl.load(codes_ptr + places, mask=mask, other=136)  # code 0 in both halves
        g = tl.arange(0, STEPS_PAD)
        has_step = held[:, None] & (g < STEPS // 2)[None, :]
        of_token = steps_ptr + tokens[:, None] * STEPS + g[None, :]
        low_step = tl.load(of_token, mask=has_step, other=0.0).to(tl.float32)
        high_step = tl.load(of_token + STEPS // 2, mask=has_step, other=0.0).to(tl.float32)
        low = ((byte & 15).to(tl.float32) - 8.0) * _spread(low_step, BLOCK, STEPS_PAD, HALF_PAD)
        high = ((byte >> 4).to(tl.float32) - 8.0) * _spread(high_step, BLOCK, STEPS_PAD, HALF_PAD)
        return low.to(TYPE), high.to(TYPE), tl.full([BLOCK], 1.0, tl.float32)


@jit
def _attend_block(
    low_query, high_query, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr, tokens, held, h, in_half, scale,
    top, weight, low_total, high_total,
    BITS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, WIDTH: tl.constexpr,
    STEPS: tl.constexpr, STEPS_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the running softmax: maximum, sum of weights, and weighted sum of both halves of values."""
    low, high, step = _load(
        keys_ptr, key_steps_ptr, tokens, held, h, in_half, low_query.dtype,
        BITS, HALF, HALF_PAD, WIDTH, STEPS, STEPS_PAD, BLOCK,
    )  # fmt: skip
    logits = product(low_query, tl.trans(low), PRECISION) + product(high_query, tl.trans(high), PRECISION)
    logits = tl.where(held[None, :], logits * (step * scale)[None, :], float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    shrink = tl.exp(top - new_top)
    probs = tl.exp(logits - new_top[:, None])
    weight = weight * shrink + tl.sum(probs, axis=1)
    low, high, step = _load(
        values_ptr, value_steps_ptr, tokens, held, h, in_half, low_query.dtype,
        BITS, HALF, HALF_PAD, WIDTH, STEPS, STEPS_PAD, BLOCK,
    )  # fmt: skip
    probs = (probs * step[None, :]).to(low.dtype)
    low_total = low_total * shrink[:, None] + product(probs, low, PRECISION)
    high_total = high_total * shrink[:, None] + product(probs, high, PRECISION)
    return new_top, weight, low_total, high_total


@jit
def _attend(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr, positions_ptr, ring_ptr,
    prompt_keys_ptr, prompt_values_ptr, prompt_key_steps_ptr, prompt_value_steps_ptr, pages_ptr, prompts_ptr, pages_slot,
    lengths_ptr, next_positions_ptr, centre_ptr, step_ptr, out_ptr, parts_ptr, marks_ptr, scale,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, capacity,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, STORED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + slot).to(tl.int32)
    g, h = tl.arange(0, GROUP_PAD), tl.arange(0, HALF_PAD)
    in_group, in_half = g < GROUP, h < HALF
    q_head_of = head * GROUP + g
    in_query = in_group[:, None] & in_half[None, :]
    q_places = q_ptr + slot * q_slot + q_head_of[:, None] * q_head + h[None, :]
    low_query = tl.load(q_places, mask=in_query, other=0.0)
    high_query = tl.load(q_places + HALF, mask=in_query, other=0.0)
    row = (slot * HEADS + head) * capacity
    if split == 0:
        position = tl.load(next_positions_ptr + slot)
        tl.store(positions_ptr + row + length, position.to(tl.int32))
        if WINDOW > 0:
            of_head = (slot * HEADS * GROUP + q_head_of[:, None]) * WINDOW + position % WINDOW
            ring = ring_ptr + of_head * (2 * HALF) + h[None, :]
            tl.store(ring, low_query, mask=in_query)
            tl.store(ring + HALF, high_query, mask=in_query)

    # The new token, as it is stored, initializes the sums of split 0. The other splits start empty.
    channel = head * (2 * HALF) + h
    low_step = tl.load(step_ptr + channel, mask=in_half, other=1.0).to(tl.float32)
    high_step = tl.load(step_ptr + channel + HALF, mask=in_half, other=1.0).to(tl.float32)
    low_centre = tl.load(centre_ptr + channel, mask=in_half, other=0.0).to(tl.float32)
    high_centre = tl.load(centre_ptr + channel + HALF, mask=in_half, other=0.0).to(tl.float32)
    new_key, new_value = k_ptr + slot * k_slot + head * k_head + h, v_ptr + slot * v_slot + head * v_head + h
    low = tl.load(new_key, mask=in_half, other=0.0).to(tl.float32) - low_centre
    high = tl.load(new_key + HALF, mask=in_half, other=0.0).to(tl.float32) - high_centre
    low_key, high_key = _encode(
        tl.div_rn(low, low_step), tl.div_rn(high, high_step),
        keys_ptr + (row + length) * WIDTH, key_steps_ptr + (row + length) * STEPS, split == 0, h, in_half,
        BITS, HALF, HALF_PAD, STEPS, STEPS_PAD,
    )  # fmt: skip
    low = tl.load(new_value, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(new_value + HALF, mask=in_half, other=0.0).to(tl.float32)
    low_value, high_value = _encode(
        low, high,
        values_ptr + (row + length) * WIDTH, value_steps_ptr + (row + length) * STEPS, split == 0, h, in_half,
        BITS, HALF, HALF_PAD, STEPS, STEPS_PAD,
    )  # fmt: skip
    low_query = (low_query.to(tl.float32) * low_step[None, :]).to(low_query.dtype)
    high_query = (high_query.to(tl.float32) * high_step[None, :]).to(high_query.dtype)
    mine = tl.sum(low_query.to(tl.float32) * low_key[None, :], axis=1)
    mine = (mine + tl.sum(high_query.to(tl.float32) * high_key[None, :], axis=1)) * scale
    first_split = tl.where(split == 0, 1.0, 0.0)
    top = tl.where(split == 0, mine, float("-inf"))
    weight = first_split * tl.full([GROUP_PAD], 1.0, tl.float32)
    low_total = first_split * (tl.zeros([GROUP_PAD, 1], tl.float32) + low_value[None, :])
    high_total = first_split * (tl.zeros([GROUP_PAD, 1], tl.float32) + high_value[None, :])

    # The splits share the blocks of the row: first the prompt's, then the slot's own.
    n = tl.arange(0, BLOCK)
    blocks = tl.cdiv(length, BLOCK)
    if STORED:
        prompt = tl.load(prompts_ptr + slot).to(tl.int32)
        prompt_blocks = tl.cdiv(prompt, BLOCK)
        blocks += prompt_blocks
    share = tl.cdiv(blocks, SPLITS)
    first, last = split * share, (split + 1) * share
    if STORED:
        for block in range(first, tl.minimum(last, prompt_blocks)):
            start = block * BLOCK
            page = tl.load(pages_ptr + slot * pages_slot + start // PAGE).to(tl.int64)
            top, weight, low_total, high_total = _attend_block(
                low_query, high_query, prompt_keys_ptr, prompt_values_ptr, prompt_key_steps_ptr, prompt_value_steps_ptr,
                (page * HEADS + head) * PAGE + start % PAGE + n, start + n < prompt, h, in_half, scale,
                top, weight, low_total, high_total,
                BITS, HALF, HALF_PAD, WIDTH, STEPS, STEPS_PAD, BLOCK, PRECISION,
            )  # fmt: skip
        first, last = tl.maximum(first - prompt_blocks, 0), last - prompt_blocks
    for start in range(first * BLOCK, tl.minimum(last * BLOCK, length), BLOCK):
        top, weight, low_total, high_total = _attend_block(
            low_query, high_query, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr,
            row + start + n, start + n < length, h, in_half, scale,
            top, weight, low_total, high_total,
            BITS, HALF, HALF_PAD, WIDTH, STEPS, STEPS_PAD, BLOCK, PRECISION,
        )  # fmt: skip

    out_row = slot * HEADS * GROUP + q_head_of
    if SPLITS == 1:
        places = out_ptr + out_row[:, None] * (2 * HALF) + h[None, :]
        tl.store(places, (low_total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=in_query)
        tl.store(places + HALF, (high_total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=in_query)
    else:
        part = out_row * SPLITS + split
        places = parts_ptr + part[:, None] * (2 * HALF) + h[None, :]
        tl.store(places, low_total, mask=in_query)
        tl.store(places + HALF, high_total, mask=in_query)
        tl.store(marks_ptr + part * 2, top, mask=in_group)
        tl.store(marks_ptr + part * 2 + 1, weight, mask=in_group)
