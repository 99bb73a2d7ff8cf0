"""Attention over stored prompts of 8-bit or 4-bit codes. A program reads a prompt once for several slots.

`code_attention.py` launches this kernel beside one that reads the slots' own tokens, and combines their parts. The kernel works as
`_attend_prompts` in `slot_attention.py`, but decodes keys and values to float16 first. The work of decoding is then shared by the
slots, too. As in the other kernels over codes, the query is multiplied by the channel steps, and the centre of keys is left out
unless soft caps or sinks depend on it.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from torch import Tensor

from .attention_4bit import _load
from .codes import _parts
from .form import AttentionForm
from .jit import jit, next_power_of_2, precision, product, tl
from .rows import StoredCodes
from .slot_attention import _cap, prompt_block


def attend_prompts(
    queries_SQD: Tensor,
    prompts: StoredCodes,
    words: tuple[Tensor, Tensor, Tensor, Tensor],
    static: tuple[Tensor, Tensor],
    parts_SQnD: Tensor,
    marks_SQn2: Tensor,
    splits: int,
    scale: float,
    form: AttentionForm,
) -> None:
    """Write the last `splits` parts of each row: attention over the slot's prompt, for queries in half precision.

    `words` are the stored codes as words of two bytes, and their steps. `static` are the centre and the step of the channels.
    """
    q_heads, dim = queries_SQD.shape[1:]
    kv_heads, page, width = words[0].shape[1:]
    group, bits = q_heads // kv_heads, 16 * width // dim
    assert prompts.readers_AM is not None and queries_SQD.element_size() == 2
    programs, members = prompts.readers_AM.shape
    _attend_prompt_codes[(programs, kv_heads, splits)](
        *(queries_SQD, *words, prompts.pages_SP, prompts.lengths_S, prompts.readers_AM, prompts.pages_SP.stride(0)),
        *(*static, parts_SQnD, marks_SQn2, scale, 1.0 if form.softcap is None else form.softcap),
        *(queries_SQD.stride(0), queries_SQD.stride(1)),
        BITS=bits,
        MEMBERS=members,
        GROUP=group,
        GROUP_PAD=next_power_of_2(group),
        HEADS=kv_heads,
        DIM=dim,
        WORDS_PAD=max(16, next_power_of_2(width)),
        STEPS=words[2].shape[3],
        PARTS=parts_SQnD.shape[2],
        SPLITS=splits,
        SHIFTED=not form.is_plain,
        CAPPED=form.softcap is not None,
        PAGE=page,
        BLOCK=prompt_block(dim, page),
        PRECISION=precision(queries_SQD),
        num_warps=4,
        num_stages=1,
    )


@jit
def _decoded(
    words_ptr, steps_ptr, tokens, held, PRECISION: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the tokens' codes multiplied by their steps, [BLOCK, D], in the order of `_column_channels`."""
    w = tl.arange(0, WORDS_PAD)
    if BITS == 8:
        words = tl.load(words_ptr + tokens[:, None] * WORDS + w[None, :], mask=held[:, None] & (w < WORDS)[None, :], other=0)
        even, odd = _parts(words, tl.float16, PRECISION, 8)
        step = tl.load(steps_ptr + tokens, mask=held, other=0.0)[:, None]
        return tl.reshape(tl.join(even * step, odd * step), [BLOCK, 2 * WORDS_PAD])
    else:
        STEPS_PAD: tl.constexpr = WORDS_PAD * STEPS // (2 * WORDS)
        parts = _load(words_ptr, steps_ptr, tokens, held, w, tl.float16, PRECISION, WORDS, WORDS_PAD, STEPS, STEPS_PAD, BLOCK)
        halves = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))  # [BLOCK, word, byte, half]
        return tl.reshape(tl.permute(halves, 0, 3, 1, 2), [BLOCK, 4 * WORDS_PAD])


@jit
def _column_channels(columns, BITS: tl.constexpr, DIM: tl.constexpr, WORDS_PAD: tl.constexpr):
    """Return the channel of each column of decoded codes, and whether it exists. In 4 bits, both halves are padded."""
    if BITS == 8 or DIM == 4 * WORDS_PAD:
        return columns, columns < DIM
    else:
        column = columns % (2 * WORDS_PAD)
        return column + columns // (2 * WORDS_PAD) * (DIM // 2), column < DIM // 2


@jit
def _attend_prompt_codes(
    q_ptr, keys_ptr, values_ptr, key_steps_ptr, value_steps_ptr, pages_ptr, prompts_ptr, readers_ptr, pages_slot,
    centre_ptr, step_ptr, parts_ptr, marks_ptr, scale, softcap, q_slot, q_head,
    BITS: tl.constexpr, MEMBERS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WORDS_PAD: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    SHIFTED: tl.constexpr, CAPPED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from the slots of a program to their prompts, which are mostly the same."""
    WORDS: tl.constexpr = DIM * BITS // 16
    ROWS: tl.constexpr = MEMBERS * GROUP_PAD
    head, split = tl.program_id(1), tl.program_id(2)
    r, n = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    c, in_dim = _column_channels(tl.arange(0, WORDS_PAD * (16 // BITS)), BITS, DIM, WORDS_PAD)
    member, g = tl.program_id(0) * MEMBERS + r // GROUP_PAD, r % GROUP_PAD
    slot = tl.load(readers_ptr + member, mask=g < GROUP, other=-1).to(tl.int64)
    real = slot >= 0
    length = tl.load(prompts_ptr + slot, mask=real, other=0).to(tl.int32)
    prompt = tl.load(pages_ptr + slot * pages_slot, mask=real, other=-1).to(tl.int32)  # a prompt is known by its first page
    mask = real[:, None] & in_dim[None, :]
    query = tl.load(q_ptr + slot[:, None] * q_slot + (head * GROUP + g)[:, None] * q_head + c[None, :], mask=mask, other=0.0)
    query = query.to(tl.float32)
    shift = tl.zeros([ROWS], tl.float32)  # what the centre adds to all logits of a query
    if SHIFTED:
        centre = tl.load(centre_ptr + head * DIM + c, mask=in_dim, other=0.0).to(tl.float32)
        shift += tl.sum(query * centre[None, :], axis=1) * scale
    query *= tl.load(step_ptr + head * DIM + c, mask=in_dim, other=1.0).to(tl.float32)[None, :]
    largest = tl.max(tl.abs(query), axis=1) + 1e-30
    query = (query * (1.0 / largest)[:, None]).to(tl.float16)
    scales = scale * largest

    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WORDS_PAD * (16 // BITS)], tl.float32)
    last = tl.max(tl.where(length > 0, prompt, -1), axis=0)
    while last >= 0:
        same = (prompt == last) & (length > 0)
        own = tl.where(same, length, 0)
        longest = tl.max(own, axis=0)
        table = pages_ptr + tl.max(tl.where(same, slot, 0), axis=0) * pages_slot
        blocks = tl.cdiv(longest, BLOCK)
        share = tl.cdiv(blocks, SPLITS)
        for block in range(split * share, tl.minimum((split + 1) * share, blocks)):
            start = block * BLOCK
            held = start + n < longest
            page = tl.load(table + start // PAGE).to(tl.int64)
            tokens = (page * HEADS + head) * PAGE + start % PAGE + n
            keys = _decoded(keys_ptr, key_steps_ptr, tokens, held, PRECISION, BITS, WORDS, WORDS_PAD, STEPS, BLOCK)
            logits = product(query, tl.trans(keys), PRECISION) * scales[:, None]
            if SHIFTED:
                logits = _cap(logits + shift[:, None], softcap, CAPPED)
            logits = tl.where((start + n)[None, :] < own[:, None], logits, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, axis=1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may have seen no key yet
            shrink = tl.exp(top - base)
            probs = tl.exp(logits - base[:, None])
            weight = weight * shrink + tl.sum(probs, axis=1)
            values = _decoded(values_ptr, value_steps_ptr, tokens, held, PRECISION, BITS, WORDS, WORDS_PAD, STEPS, BLOCK)
            total = total * shrink[:, None] + product(probs.to(tl.float16), values, PRECISION)
            top = new_top
        last = tl.max(tl.where((length > 0) & (prompt < last), prompt, -1), axis=0)
    part = (slot * HEADS * GROUP + head * GROUP + g) * PARTS + PARTS - SPLITS + split
    tl.store(parts_ptr + part[:, None] * DIM + c[None, :], total, mask=mask)
    tl.store(marks_ptr + part * 2, top, mask=real)
    tl.store(marks_ptr + part * 2 + 1, weight, mask=real)
