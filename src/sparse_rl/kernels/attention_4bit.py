"""One decode step of one layer over a cache of 4-bit codes, in one launch: encode and store the new key and value, store the
query, and attend over the stored prompt and the slot.

`code_attention.py` launches this kernel and names its torch reference. A program works as in `slot_attention.py`, but reads
codes. The query is multiplied by the channel steps once. The centre of keys is left out, because it adds the same number to all
logits of a query. With soft caps or sinks, which depend on that number, it is computed once and added.

The product of a head is the sum of the products of its four parts (`codes.py`). The products of a 16-bit model run in float16, in
which all codes are exact.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from .codes import _channel, _encode, _parts, _spread
from .jit import jit, product, tl
from .slot_attention import _cap


@jit
def _load(
    codes_ptr, steps_ptr, tokens, held, w, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the four parts [BLOCK, WORDS_PAD] of the tokens' codes, multiplied by their steps."""
    mask = held[:, None] & (w < WORDS)[None, :]
    words = tl.load(codes_ptr + tokens[:, None] * WORDS + w[None, :], mask=mask, other=0)
    parts = _parts(words, TYPE, PRECISION, 4)
    g = tl.arange(0, STEPS_PAD)
    has_step = held[:, None] & (g < STEPS // 2)[None, :]
    scaled = ()
    for half in tl.static_range(2):
        of_token = steps_ptr + tokens[:, None] * STEPS + half * (STEPS // 2) + g[None, :]
        step = _spread(tl.load(of_token, mask=has_step, other=0.0).to(TYPE), BLOCK, STEPS_PAD, WORDS_PAD)
        for byte in tl.static_range(2):
            scaled = scaled + (parts[2 * half + byte] * step,)
    return scaled


@jit
def _attend_block(
    query, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr, tokens, held, w, scale, shift, softcap, top, weight, totals,
    GROUP_PAD: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr,
    STEPS: tl.constexpr, STEPS_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    SHIFTED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the running softmax: maximum, sum of weights, and weighted sum of each part of values."""
    keys = _load(
        keys_ptr, key_steps_ptr, tokens, held, w, query[0].dtype, PRECISION, WORDS, WORDS_PAD, STEPS, STEPS_PAD, BLOCK
    )
    logits = tl.zeros([GROUP_PAD, BLOCK], tl.float32)
    for part in tl.static_range(4):
        logits += product(query[part], tl.trans(keys[part]), PRECISION)
    logits *= scale[:, None]
    if SHIFTED:
        logits = _cap(logits + shift[:, None], softcap, CAPPED)
    logits = tl.where(held[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    shrink = tl.exp(top - new_top)
    probs = tl.exp(logits - new_top[:, None])
    weight = weight * shrink + tl.sum(probs, axis=1)
    values = _load(
        values_ptr, value_steps_ptr, tokens, held, w, query[0].dtype, PRECISION, WORDS, WORDS_PAD, STEPS, STEPS_PAD, BLOCK
    )
    probs, added = probs.to(query[0].dtype), ()
    for part in tl.static_range(4):
        added = added + (totals[part] * shrink[:, None] + product(probs, values[part], PRECISION),)
    return new_top, weight, added


@jit
def _attend_4bit(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr, positions_ptr, ring_ptr,
    prompt_keys_ptr, prompt_values_ptr, prompt_key_steps_ptr, prompt_value_steps_ptr, pages_ptr, prompts_ptr, pages_slot,
    lengths_ptr, next_positions_ptr, centre_ptr, step_ptr, out_ptr, sums_ptr, marks_ptr, scale, softcap, sinks_ptr,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, capacity,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, STORED: tl.constexpr,
    SHIFTED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    slot, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + slot).to(tl.int32)
    position = tl.load(next_positions_ptr + slot)
    g, w = tl.arange(0, GROUP_PAD), tl.arange(0, WORDS_PAD)
    in_group, in_words = g < GROUP, w < WORDS
    q_head_of = head * GROUP + g
    in_query = in_group[:, None] & in_words[None, :]
    row = (slot * HEADS + head) * capacity
    if split == 0:
        tl.store(positions_ptr + row + length, position.to(tl.int32))

    # The query, and the new token as it is stored
    query, key, value = (), (), ()
    largest = tl.zeros([GROUP_PAD], tl.float32) + 1e-30
    shift = tl.zeros([GROUP_PAD], tl.float32)  # what the centre adds to all logits of a query
    for part in tl.static_range(4):
        c = _channel(w, part, DIM)
        q = tl.load(q_ptr + slot * q_slot + q_head_of[:, None] * q_head + c[None, :], mask=in_query, other=0.0)
        if WINDOW > 0:
            if split == 0:
                place = (slot * HEADS * GROUP + q_head_of[:, None]) * WINDOW + position % WINDOW
                tl.store(ring_ptr + place * DIM + c[None, :], q, mask=in_query)
        centre = tl.load(centre_ptr + head * DIM + c, mask=in_words, other=0.0).to(tl.float32)
        step = tl.load(step_ptr + head * DIM + c, mask=in_words, other=1.0).to(tl.float32)
        k = tl.load(k_ptr + slot * k_slot + head * k_head + c, mask=in_words, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + slot * v_slot + head * v_head + c, mask=in_words, other=0.0).to(tl.float32)
        q = q.to(tl.float32)
        if SHIFTED:
            shift += tl.sum(q * centre[None, :], axis=1) * scale
        q = q * step[None, :]
        largest = tl.maximum(largest, tl.max(tl.abs(q), axis=1))
        query, key, value = query + (q,), key + (tl.div_rn(k - centre, step),), value + (v,)
    place = row + length
    key = _encode(
        key, keys_ptr + place * WORDS, key_steps_ptr + place * STEPS, split == 0, w, WORDS, WORDS_PAD, STEPS, STEPS_PAD
    )
    value = _encode(
        value, values_ptr + place * WORDS, value_steps_ptr + place * STEPS, split == 0, w,
        WORDS, WORDS_PAD, STEPS, STEPS_PAD,
    )  # fmt: skip

    # The new token initializes the sums of split 0. The other splits start empty.
    is_first = tl.where(split == 0, 1.0, 0.0)
    mine = tl.zeros([GROUP_PAD], tl.float32)
    scaled, totals = (), ()
    for part in tl.static_range(4):
        mine += tl.sum(query[part] * key[part][None, :], axis=1)
        if FLOAT32:
            scaled = scaled + (query[part],)
        else:
            scaled = scaled + ((query[part] / largest[:, None]).to(tl.float16),)
    query = scaled
    mine = _cap(mine * scale + shift, softcap, CAPPED)
    top, own, extra = mine, tl.full([GROUP_PAD], 1.0, tl.float32), tl.zeros([GROUP_PAD], tl.float32)
    if SINKS:  # a sink adds to the sum of weights, and not to that of values
        sink = tl.load(sinks_ptr + q_head_of, mask=in_group, other=0.0).to(tl.float32)
        top = tl.maximum(mine, sink)
        own, extra = tl.exp(mine - top), tl.exp(sink - top)
    top = tl.where(split == 0, top, float("-inf"))
    weight = is_first * (own + extra)
    for part in tl.static_range(4):
        totals = totals + (is_first * own[:, None] * value[part][None, :],)
    scales = tl.zeros([GROUP_PAD], tl.float32) + scale
    if not FLOAT32:
        scales *= largest

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
            tokens = (page * HEADS + head) * PAGE + start % PAGE + n
            top, weight, totals = _attend_block(
                query, prompt_keys_ptr, prompt_values_ptr, prompt_key_steps_ptr, prompt_value_steps_ptr,
                tokens, start + n < prompt, w, scales, shift, softcap,
                top, weight, totals,
                GROUP_PAD, WORDS, WORDS_PAD, STEPS, STEPS_PAD, BLOCK, PRECISION, SHIFTED, CAPPED,
            )  # fmt: skip
        first, last = tl.maximum(first - prompt_blocks, 0), last - prompt_blocks
    for start in range(first * BLOCK, tl.minimum(last * BLOCK, length), BLOCK):
        top, weight, totals = _attend_block(
            query, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr,
            row + start + n, start + n < length, w, scales, shift, softcap, top, weight, totals,
            GROUP_PAD, WORDS, WORDS_PAD, STEPS, STEPS_PAD, BLOCK, PRECISION, SHIFTED, CAPPED,
        )  # fmt: skip

    out_row = slot * HEADS * GROUP + q_head_of
    for part in tl.static_range(4):
        c = _channel(w, part, DIM)
        if PARTS == 1:
            out = (totals[part] / weight[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] * DIM + c[None, :], out, mask=in_query)
        else:
            place = (out_row * PARTS + split)[:, None] * DIM + c[None, :]
            tl.store(sums_ptr + place, totals[part], mask=in_query)
    if PARTS > 1:
        tl.store(marks_ptr + (out_row * PARTS + split) * 2, top, mask=in_group)
        tl.store(marks_ptr + (out_row * PARTS + split) * 2 + 1, weight, mask=in_group)
