"""One decode step of one layer over a cache of 8-bit codes, in one launch: attend over the stored prompt and the slot, encode
and store the new key and value, and store the query.

`code_attention.py` launches this kernel and names its torch reference. A program processes one slot and at most eight query heads
of one kv head, because the sums of more heads do not fit in registers. Each warp reads its own tokens and keeps its own running
softmax, so warps wait for each other only at the end.

The query is multiplied by the channel steps and rounded to the sum of two rows of 8-bit codes, coarse and fine. Its products with
the codes of keys are then integers. The fine codes fill rows of the matrix product that would otherwise be padding. The centre of
keys is left out, because it adds the same number to all logits of a query. Soft caps and sinks depend on that number, so it is
added for them.

Values are read as words of two bytes (`codes.py`), and their products run in float16, in which all codes are exact. In a float32
model all products run in float32.
"""

# G padded query heads of a kv head, D padded head dimension, W warps, T tokens that a warp reads at a time, R rows of a product

# mypy: disable-error-code="assignment"

from __future__ import annotations

from .codes import WEIGHT_FACTOR, _parts, _rounded, _step_of_token
from .jit import jit, product, tl
from .slot_attention import _cap

if tl is not None:
    FINE = tl.constexpr(256)  # fine codes of a coarse one
    LOG2_E = tl.constexpr(1.4426950408889634)
    LOWEST = tl.constexpr(-1e30)  # of a warp without tokens; differences of it are finite


@jit
def _tokens(WARPS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the places [W, T] of a block's tokens."""
    return tl.arange(0, WARPS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]


@jit
def _steps(key_steps_ptr, value_steps_ptr, row, count, WARPS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the steps of keys and of values, [W, T] each, of the first `count` tokens from `row` on."""
    n = _tokens(WARPS, TOKENS)
    return (
        tl.load(key_steps_ptr + row + n, mask=n < count, other=0.0),
        tl.load(value_steps_ptr + row + n, mask=n < count, other=0.0),
    )


@jit
def _stored_row(table, start, prompt, head, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Return the place of token `start` of a prompt in the pool of pages."""
    page = tl.load(table + start // PAGE, mask=start < prompt, other=0).to(tl.int64)
    return (page * HEADS + head) * PAGE + start % PAGE


@jit
def _attend_block(
    query, keys_ptr, values_ptr, steps, row, count, scale, shift, softcap, top, weight, totals,
    GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr,
    SHIFTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Add the first `count` tokens from `row` on, at most T a warp, to the running softmax of each warp.

    The running softmax has three parts: the largest logit [W, G], times log2(e); the sum of weights [W, G]; and the weighted sums of
    the even and of the odd channels of values, [W, R, D / 2] each.
    """
    n = _tokens(WARPS, TOKENS)
    held = n < count
    key_steps, value_steps = steps[0].to(tl.float32), steps[1].to(tl.float32)
    c, w = tl.arange(0, DIM_PAD), tl.arange(0, DIM_PAD // 2)
    codes = tl.load(
        keys_ptr + row * DIM + n[:, :, None] * DIM + c[None, None, :],
        mask=held[:, :, None] & (c < DIM)[None, None, :],
        other=0,
    )
    words = tl.load(
        values_ptr + row * (DIM // 2) + n[:, :, None] * (DIM // 2) + w[None, None, :],
        mask=held[:, :, None] & (w < DIM // 2)[None, None, :],
        other=0,
    )
    codes = tl.trans(codes, 0, 2, 1)
    if FLOAT32:
        logits = product(query, codes.to(tl.float32), PRECISION)
    else:
        both = tl.reshape(tl.dot(query, codes), [WARPS, 2, GROUP_PAD, TOKENS])
        is_coarse = (tl.arange(0, 2) == 0)[None, :, None, None]
        logits = tl.sum(tl.where(is_coarse, both * FINE, both), axis=1).to(tl.float32)
    logits *= key_steps[:, None, :] * scale[None, :, None]
    if SHIFTED:
        logits = _cap(logits + shift[None, :, None], softcap, CAPPED) * LOG2_E
    logits = tl.where(held[:, None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=2))
    shrink = tl.exp2(top - new_top)
    probs = tl.exp2(logits - new_top[:, :, None])
    weight = weight * shrink + tl.sum(probs, axis=2)
    probs *= value_steps[:, None, :] * WEIGHT_FACTOR
    shrink = shrink[:, :, None]
    if FLOAT32:
        even, odd = _parts(words, tl.float32, PRECISION, 8)
    else:
        even, odd = _parts(words, tl.float16, PRECISION, 8)
        probs = _padded(probs.to(tl.float16), 0.0)
        shrink = _padded(shrink, 1.0)
    totals = (totals[0] * shrink + product(probs, even, PRECISION), totals[1] * shrink + product(probs, odd, PRECISION))
    return new_top, weight, totals


@jit
def _padded(rows, other: tl.constexpr):
    """Return the rows [W, G, n] as [W, 2 G, n]. The second half is `other`."""
    WARPS: tl.constexpr = rows.shape[0]
    GROUP_PAD: tl.constexpr = rows.shape[1]
    copies = tl.broadcast_to(rows[:, None], [WARPS, 2, GROUP_PAD, rows.shape[2]])
    is_first = (tl.arange(0, 2) == 0)[None, :, None, None]
    return tl.reshape(tl.where(is_first, copies, other), [WARPS, 2 * GROUP_PAD, rows.shape[2]])


@jit
def _encoded(key, value):
    """Return the codes [D, 2] and the steps [2] of a key and a value [D]."""
    both = tl.join(key, value)
    steps = _step_of_token(tl.max(tl.abs(both), axis=0))
    return tl.minimum(tl.maximum(_rounded(tl.div_rn(both, steps[None, :])), -128.0), 127.0), steps


@jit
def _attend_8bit(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr, positions_ptr, ring_ptr,
    prompt_keys_ptr, prompt_values_ptr, prompt_key_steps_ptr, prompt_value_steps_ptr, pages_ptr, prompts_ptr, pages_slot,
    lengths_ptr, next_positions_ptr, centre_ptr, step_ptr, out_ptr, sums_ptr, marks_ptr, scale, softcap, sinks_ptr,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, capacity,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PROGRAMS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, STORED: tl.constexpr, SHIFTED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, PAGE: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    slot, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1) // PROGRAMS, tl.program_id(2)
    part = tl.program_id(1) % PROGRAMS  # of the query heads of a kv head
    BLOCK: tl.constexpr = WARPS * TOKENS
    ROWS: tl.constexpr = GROUP_PAD if FLOAT32 else 2 * GROUP_PAD
    length = tl.load(lengths_ptr + slot).to(tl.int32)
    position = tl.load(next_positions_ptr + slot)
    g, c = part * GROUP_PAD + tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    in_group, in_dim = g < GROUP, c < DIM
    in_query = in_group[:, None] & in_dim[None, :]
    q_heads = head * GROUP + g
    row = (slot * HEADS + head) * capacity
    is_first = split == 0

    # Load the new token, and prepare its query
    q = tl.load(q_ptr + slot * q_slot + q_heads[:, None] * q_head + c[None, :], mask=in_query, other=0.0)
    step = tl.load(step_ptr + head * DIM + c, mask=in_dim, other=1.0).to(tl.float32)
    centre = tl.load(centre_ptr + head * DIM + c, mask=in_dim, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + slot * k_slot + head * k_head + c, mask=in_dim, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + slot * v_slot + head * v_head + c, mask=in_dim, other=0.0).to(tl.float32)
    if WINDOW > 0:
        if is_first:
            place = (slot * HEADS * GROUP + q_heads[:, None]) * WINDOW + position % WINDOW
            tl.store(ring_ptr + place * DIM + c[None, :], q, mask=in_query)
    q = q.to(tl.float32)
    shift = tl.zeros([GROUP_PAD], tl.float32)  # what the centre adds to all logits of a query
    if SHIFTED:
        shift += tl.sum(q * centre[None, :], axis=1) * scale
    q *= step[None, :]
    scales = tl.zeros([GROUP_PAD], tl.float32) + scale
    if not SHIFTED:
        scales *= LOG2_E
    query = q
    if not FLOAT32:
        largest = tl.max(tl.abs(q), axis=1) + 1e-30
        query = q * (127.0 / largest)[:, None]
        coarse = _rounded(query)
        fine = tl.minimum(_rounded((query - coarse) * FINE), 127.0)
        query = tl.reshape(tl.permute(tl.join(coarse, fine), 2, 0, 1), [ROWS, DIM_PAD]).to(tl.int8)
        scales *= largest / (127.0 * FINE)
    query = tl.broadcast_to(query[None], [WARPS, ROWS, DIM_PAD])

    # Store the new token. Split 0 attends to it.
    place = row + length
    codes, new_steps = _encoded(tl.div_rn(k - centre, step), v)
    key, value = tl.split(codes * new_steps[None, :])
    if is_first & (part == 0):
        tl.store(positions_ptr + place, position.to(tl.int32))
        key_step, value_step = tl.split(new_steps)
        tl.store(key_steps_ptr + place, key_step.to(tl.float16))
        tl.store(value_steps_ptr + place, value_step.to(tl.float16))
        key_codes, value_codes = tl.split(codes.to(tl.int8))
        tl.store(keys_ptr + place * DIM + c, key_codes, mask=in_dim)
        tl.store(values_ptr + place * DIM + c, value_codes, mask=in_dim)
    own = _cap(tl.sum(q * key[None, :], axis=1) * scale + shift, softcap, CAPPED) * LOG2_E
    own = tl.where(is_first, own, LOWEST)

    # Attend. The splits share the blocks of the row: first the prompt's, then the slot's own.
    top = tl.full([WARPS, GROUP_PAD], LOWEST, tl.float32)
    weight = tl.zeros([WARPS, GROUP_PAD], tl.float32)
    zeros = tl.zeros([WARPS, ROWS, DIM_PAD // 2], tl.float32)
    totals = (zeros, zeros)
    blocks = tl.cdiv(length, BLOCK)
    if STORED:
        prompt = tl.load(prompts_ptr + slot).to(tl.int32)
        prompt_blocks = tl.cdiv(prompt, BLOCK)
        blocks += prompt_blocks
    share = tl.cdiv(blocks, SPLITS)
    first, last = split * share, (split + 1) * share
    if STORED:
        words_ptr = prompt_values_ptr.to(tl.pointer_type(tl.int16))
        table, start = pages_ptr + slot * pages_slot, first * BLOCK
        tokens = _stored_row(table, start, prompt, head, HEADS, PAGE)
        steps = _steps(prompt_key_steps_ptr, prompt_value_steps_ptr, tokens, prompt - start, WARPS, TOKENS)
        for start in range(first * BLOCK, tl.minimum(last * BLOCK, prompt), BLOCK):
            later = start + BLOCK  # the next block's steps are loaded while this block is attended to
            next_tokens = _stored_row(table, later, prompt, head, HEADS, PAGE)
            next_steps = _steps(prompt_key_steps_ptr, prompt_value_steps_ptr, next_tokens, prompt - later, WARPS, TOKENS)
            top, weight, totals = _attend_block(
                query, prompt_keys_ptr, words_ptr, steps, tokens, prompt - start, scales, shift, softcap, top, weight, totals,
                GROUP_PAD, DIM, DIM_PAD, WARPS, TOKENS, SHIFTED, CAPPED, PRECISION, FLOAT32,
            )  # fmt: skip
            tokens, steps = next_tokens, next_steps
        first, last = tl.maximum(first - prompt_blocks, 0), last - prompt_blocks
    words_ptr = values_ptr.to(tl.pointer_type(tl.int16))
    steps = _steps(key_steps_ptr, value_steps_ptr, row + first * BLOCK, length - first * BLOCK, WARPS, TOKENS)
    for start in range(first * BLOCK, tl.minimum(last * BLOCK, length), BLOCK):
        later = start + BLOCK
        next_steps = _steps(key_steps_ptr, value_steps_ptr, row + later, length - later, WARPS, TOKENS)
        top, weight, totals = _attend_block(
            query, keys_ptr, words_ptr, steps, row + start, length - start, scales, shift, softcap, top, weight, totals,
            GROUP_PAD, DIM, DIM_PAD, WARPS, TOKENS, SHIFTED, CAPPED, PRECISION, FLOAT32,
        )  # fmt: skip
        steps = next_steps

    # Combine the warps, the new token and the sink, which adds to the sum of weights and not to that of values
    highest = tl.maximum(tl.max(top, axis=0), own)
    if SINKS:
        sink = tl.load(sinks_ptr + q_heads, mask=in_group, other=0.0).to(tl.float32) * LOG2_E
        sink = tl.where(is_first, sink, LOWEST)
        highest = tl.maximum(highest, sink)
    own = tl.where(is_first, tl.exp2(own - highest), 0.0)
    shares = tl.exp2(top - highest[None, :])
    weight = tl.sum(weight * shares, axis=0) + own
    if SINKS:
        weight += tl.exp2(sink - highest)
    total = tl.reshape(tl.join(totals[0], totals[1]), [WARPS, ROWS // GROUP_PAD, GROUP_PAD, DIM_PAD])
    total = tl.sum(tl.sum(total, axis=1) * shares[:, :, None], axis=0) / WEIGHT_FACTOR + own[:, None] * value[None, :]
    out_rows = slot * HEADS * GROUP + q_heads
    if PARTS == 1:
        out = (total / weight[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] * DIM + c[None, :], out, mask=in_query)
    else:
        place = out_rows * PARTS + split
        tl.store(sums_ptr + place[:, None] * DIM + c[None, :], total, mask=in_query)
        tl.store(marks_ptr + place * 2, highest / LOG2_E, mask=in_group)
        tl.store(marks_ptr + place * 2 + 1, weight, mask=in_group)
