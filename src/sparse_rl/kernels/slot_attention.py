"""One decode step of one layer: store the new key, value and query in their slot, and attend over the slot.

The torch reference is `SlotCache.append`, `append_queries` and `attention.decode_attention`. A program processes one slot and
one kv head, and reads the slot's keys once for all query heads of that kv head. If the slot's prompt is in the prompt store,
the program reads the prompt's pages first; the reference is then `attention.prompt_attention` and `attention_part`. If the
slots are assigned to programs by their prompts (`prompt_readers.py`), another launch reads a prompt once for several slots. If
several programs share a row, a last launch combines their parts. `attend_in_ring` runs the same kernel over the ring buffers of a
sliding-window layer; the reference is `WindowStore.append` and `attention.decode_attention`.
"""

# S slots, Q query heads, H kv heads, C capacity, D head dimension, W window, n parts of a row; stored prompts: see rows.py

from __future__ import annotations

import torch
from torch import Tensor

from .form import PLAIN, AttentionForm
from .jit import jit, next_power_of_2, precision, product, tl
from .prompt_readers import members_of
from .rows import StoredPrompts

PROMPT_SPLITS = 64
"""Maximum number of programs that share the prompts of these slots."""
BLOCK = 64
"""Number of keys that a program reads at a time, if several programs share a row. Otherwise half of it, with half of the
warps, is faster."""
PROGRAMS_PER_SM = 4
"""Programs per multiprocessor up to which splitting rows is faster, if each row is split at least three times."""


def attend_and_append(
    queries_SQD: Tensor,
    keys_SHD: Tensor,
    values_SHD: Tensor,
    cached_keys_SHCD: Tensor,
    cached_values_SHCD: Tensor,
    positions_SHC: Tensor,
    ring_SQWD: Tensor,
    lengths_S: Tensor,
    next_positions_S: Tensor,
    *,
    scale: float,
    splits: int = 1,
    prompts: StoredPrompts | None = None,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Return the attention output [S, Q, D] of each slot's query over its prompt, its first `lengths` keys and the new key.

    The new key is stored at index `lengths`. The function writes the caches, the positions and the ring buffer in place. The
    caller increments the lengths at the end of the step.
    """
    cached = (cached_keys_SHCD, cached_values_SHCD, positions_SHC, ring_SQWD)
    places = (lengths_S, next_positions_S)
    return _launch(queries_SQD, keys_SHD, values_SHD, cached, places, scale, splits, prompts, form, wraps=False)


def attend_in_ring(
    queries_SQD: Tensor,
    keys_SHD: Tensor,
    values_SHD: Tensor,
    ring_keys_SHCD: Tensor,
    ring_values_SHCD: Tensor,
    next_positions_S: Tensor,
    *,
    scale: float,
    splits: int = 1,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Return the attention output [S, Q, D] of each slot's query over the tokens in its ring buffer and the new key.

    The new key replaces the one at its position modulo the capacity, which is then outside the window.
    """
    cached = (ring_keys_SHCD, ring_values_SHCD, next_positions_S, queries_SQD[:, :, None, :0])
    places = (next_positions_S, next_positions_S)
    return _launch(queries_SQD, keys_SHD, values_SHD, cached, places, scale, splits, None, form, wraps=True)


def _launch(
    queries_SQD: Tensor,
    keys_SHD: Tensor,
    values_SHD: Tensor,
    cached: tuple[Tensor, Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    scale: float,
    splits: int,
    prompts: StoredPrompts | None,
    form: AttentionForm,
    *,
    wraps: bool,
) -> Tensor:
    cached_keys_SHCD, cached_values_SHCD, positions_SHC, ring_SQWD = cached
    lengths_S, next_positions_S = places
    slots, q_heads, dim = queries_SQD.shape
    kv_heads, capacity = cached_keys_SHCD.shape[1:3]
    group, window = q_heads // kv_heads, 0 if wraps else ring_SQWD.shape[2]
    queries, keys, values = (_rows(tensor) for tensor in (queries_SQD, keys_SHD, values_SHD))
    out = torch.empty(slots, q_heads, dim, dtype=queries.dtype, device=queries.device)
    shared = prompts is not None and prompts.readers_AM is not None
    prompt_splits, parts, marks = part_buffers(out, kv_heads, splits, shared=shared)
    parts_of_row = splits + prompt_splits
    block = BLOCK if dim <= 128 and splits > 1 else BLOCK // 2
    stored, width, page = (keys, values, lengths_S, lengths_S), 0, block
    if prompts is not None:
        stored = (prompts.keys_NHTD, prompts.values_NHTD, prompts.pages_SP, prompts.lengths_S)
        width, page = prompts.pages_SP.stride(0), prompts.keys_NHTD.shape[2]
    softcap = 1.0 if form.softcap is None else form.softcap
    if prompts is not None and prompts.readers_AM is not None:
        programs, members = prompts.readers_AM.shape
        _attend_prompts[(programs, kv_heads, prompt_splits)](
            *(queries, *stored, prompts.readers_AM, width, parts, marks, scale, softcap),
            *(queries.stride(0), queries.stride(1)),
            MEMBERS=members,
            GROUP=group,
            GROUP_PAD=next_power_of_2(group),
            HEADS=kv_heads,
            DIM=dim,
            DIM_PAD=max(16, next_power_of_2(dim)),
            OWN=splits,
            PARTS=parts_of_row,
            CAPPED=form.softcap is not None,
            PAGE=page,
            BLOCK=prompt_block(dim, page),
            PRECISION=precision(queries),
            num_warps=4,
            num_stages=1 if queries.dtype == torch.float32 else 2,
        )
    _attend[(slots, kv_heads, splits)](
        *(queries, keys, values, cached_keys_SHCD, cached_values_SHCD, positions_SHC, ring_SQWD, *stored, width),
        *(lengths_S, next_positions_S, out, parts, marks, scale),
        *(softcap, lengths_S if form.sinks_Q is None else form.sinks_Q),
        *(queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *(cached_keys_SHCD.stride(0), cached_keys_SHCD.stride(1), capacity),
        GROUP=group,
        GROUP_PAD=max(16, next_power_of_2(group)),
        HEADS=kv_heads,
        DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)),
        WINDOW=window,
        SPLITS=splits,
        PARTS=parts_of_row,
        STORED=prompts is not None and not shared,
        WRAPS=wraps,
        CAPPED=form.softcap is not None,
        SINKS=form.sinks_Q is not None,
        PAGE=page,
        BLOCK=block,
        PRECISION=precision(queries),
        num_warps=4 if splits > 1 else 2,
        num_stages=3 if splits == 1 and dim * queries.element_size() <= 512 else 2,  # shared memory of a 24 GB GPU
    )
    if parts_of_row > 1:
        combine(parts, marks, out)
    return out


def combine(parts_SQnD: Tensor, marks_SQn2: Tensor, out_SQD: Tensor) -> None:
    """Write the attention output of rows whose n parts are unnormalized sums of values, with their maximum and weight."""
    slots, q_heads, splits, dim = parts_SQnD.shape
    _combine[(slots, q_heads)](
        *(parts_SQnD, marks_SQn2, out_SQD),
        HEADS=q_heads,
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        SPLITS=splits,
        SPLITS_PAD=next_power_of_2(splits),
        num_warps=1,
    )


def part_buffers(out_SQD: Tensor, kv_heads: int, splits: int, *, shared: bool) -> tuple[int, Tensor, Tensor]:
    """Return the splits of stored prompts, and buffers for each part's sums and its (maximum, weight).

    Other programs read the stored prompts if the slots share them (`shared`). A row of one part needs no buffer: `out` stands in.
    """
    slots, q_heads, dim = out_SQD.shape
    members = members_of(q_heads // kv_heads)
    prompt_splits = prompt_splits_for(slots, members, kv_heads, out_SQD.device) if shared else 0
    parts = splits + prompt_splits
    if parts == 1:
        return prompt_splits, out_SQD, out_SQD
    parts_SQnD = torch.empty(slots, q_heads, parts, dim, dtype=torch.float32, device=out_SQD.device)
    return prompt_splits, parts_SQnD, parts_SQnD.new_empty(slots, q_heads, parts, 2)


def prompt_block(dim: int, page: int) -> int:
    """Return the number of tokens that a program over stored prompts reads at a time. Larger heads take fewer."""
    return min(page, BLOCK if dim <= 128 else BLOCK // 2 if dim <= 256 else BLOCK // 4)


def prompt_splits_for(slots: int, members: int, kv_heads: int, device: torch.device) -> int:
    """Return the number of programs that share the prompts of `members` slots."""
    return max(1, min(PROMPT_SPLITS, 2 * processors_of(device) // (-(-slots // members) * kv_heads)))


def processors_of(device: torch.device) -> int:
    """Return the number of a GPU's streaming multiprocessors, or a number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def splits_for(slots: int, kv_heads: int, capacity: int, processors: int) -> int:
    """Return the number of programs that share a row. Few slots then also occupy the whole device. Each program gets at least
    two blocks of a full row."""
    wanted = PROGRAMS_PER_SM * processors // (slots * kv_heads)
    return max(1, min(wanted, capacity // (2 * BLOCK), 64)) if wanted > 2 else 1


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@jit
def _cap(logits, softcap, CAPPED: tl.constexpr):
    """Return softcap * tanh(logits / softcap) if the logits are capped. Triton has no tanh of its own."""
    if CAPPED:
        logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
    return logits


@jit
def _attend_block(
    query, keys_ptr, values_ptr, mask, seen, scale, softcap, top, weight, total,
    CAPPED: tl.constexpr, GUARDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the running softmax: maximum, sum of weights, and weighted sum of values."""
    keys = tl.load(keys_ptr, mask=mask, other=0.0)
    logits = _cap(product(query, tl.trans(keys), PRECISION) * scale, softcap, CAPPED)
    logits = tl.where(seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    base = new_top
    if GUARDED:  # a row may have seen no key yet
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp(top - base)
    probs = tl.exp(logits - base[:, None])
    values = tl.load(values_ptr, mask=mask, other=0.0)
    total = total * shrink[:, None] + product(probs.to(values.dtype), values, PRECISION)
    return new_top, weight * shrink + tl.sum(probs, axis=1), total


@jit
def _attend(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, positions_ptr, ring_ptr,
    prompt_keys_ptr, prompt_values_ptr, pages_ptr, prompts_ptr, pages_slot,
    lengths_ptr, next_positions_ptr, out_ptr, parts_ptr, marks_ptr, scale, softcap, sinks_ptr,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, row_slot, row_head, capacity,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, STORED: tl.constexpr,
    WRAPS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + slot).to(tl.int32)
    index = length  # of the new token
    if WRAPS:
        index = length % capacity
        length = tl.minimum(length, capacity)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    in_group, in_dim = g < GROUP, d < DIM
    q_head_of = head * GROUP + g
    query = tl.load(
        q_ptr + slot * q_slot + q_head_of[:, None] * q_head + d[None, :], mask=in_group[:, None] & in_dim[None, :], other=0.0
    )
    key_row = keys_ptr + slot * row_slot + head * row_head
    value_row = values_ptr + slot * row_slot + head * row_head

    new_key = tl.load(k_ptr + slot * k_slot + head * k_head + d, mask=in_dim, other=0.0)
    new_value = tl.load(v_ptr + slot * v_slot + head * v_head + d, mask=in_dim, other=0.0)
    if split == 0:
        position = tl.load(next_positions_ptr + slot)
        tl.store(key_row + index * DIM + d, new_key, mask=in_dim)
        tl.store(value_row + index * DIM + d, new_value, mask=in_dim)
        if not WRAPS:
            tl.store(positions_ptr + (slot * HEADS + head) * capacity + index, position.to(tl.int32))
        if WINDOW > 0:
            place = ring_ptr + ((slot * HEADS * GROUP + q_head_of[:, None]) * WINDOW + position % WINDOW) * DIM + d[None, :]
            tl.store(place, query, mask=in_group[:, None] & in_dim[None, :])

    # The new token initializes the sums of split 0. The other splits start empty.
    mine = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
    mine = _cap(mine, softcap, CAPPED)
    top, own, extra = mine, tl.full([GROUP_PAD], 1.0, tl.float32), tl.zeros([GROUP_PAD], tl.float32)
    if SINKS:  # a sink adds to the sum of weights, and not to that of values
        sink = tl.load(sinks_ptr + q_head_of, mask=in_group, other=0.0).to(tl.float32)
        top = tl.maximum(mine, sink)
        own, extra = tl.exp(mine - top), tl.exp(sink - top)
    top = tl.where(split == 0, top, float("-inf"))
    weight = tl.where(split == 0, own + extra, 0.0)
    total = tl.where(split == 0, own, 0.0)[:, None] * new_value.to(tl.float32)[None, :]

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
            held = start + n < prompt
            places = ((page * HEADS + head) * PAGE + start % PAGE + n)[:, None] * DIM + d[None, :]
            top, weight, total = _attend_block(
                query, prompt_keys_ptr + places, prompt_values_ptr + places, held[:, None] & in_dim[None, :], held[None, :],
                scale, softcap, top, weight, total, CAPPED, WRAPS, PRECISION,
            )  # fmt: skip
        first, last = tl.maximum(first - prompt_blocks, 0), last - prompt_blocks
    for start in range(first * BLOCK, tl.minimum(last * BLOCK, length), BLOCK):
        held = start + n < length
        if WRAPS:  # this may hide the only key of a block, so the softmax is guarded; all other blocks hold a key
            held = held & (start + n != index)
        places = (start + n)[:, None] * DIM + d[None, :]
        top, weight, total = _attend_block(
            query, key_row + places, value_row + places, held[:, None] & in_dim[None, :], held[None, :],
            scale, softcap, top, weight, total, CAPPED, WRAPS, PRECISION,
        )  # fmt: skip

    row = slot * HEADS * GROUP + q_head_of
    if PARTS == 1:
        out = total / weight[:, None]
        tl.store(
            out_ptr + row[:, None] * DIM + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=in_group[:, None] & in_dim[None, :],
        )
    else:
        part = row * PARTS + split
        tl.store(parts_ptr + part[:, None] * DIM + d[None, :], total, mask=in_group[:, None] & in_dim[None, :])
        tl.store(marks_ptr + part * 2, top, mask=in_group)
        tl.store(marks_ptr + part * 2 + 1, weight, mask=in_group)


@jit
def _attend_prompts(
    q_ptr, keys_ptr, values_ptr, pages_ptr, prompts_ptr, readers_ptr, pages_slot, parts_ptr, marks_ptr, scale, softcap,
    q_slot, q_head,
    MEMBERS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from the slots of a program to their prompts, which are mostly the same."""
    head, split = tl.program_id(1), tl.program_id(2)
    r, d, n = tl.arange(0, MEMBERS * GROUP_PAD), tl.arange(0, DIM_PAD), tl.arange(0, BLOCK)
    member, g = tl.program_id(0) * MEMBERS + r // GROUP_PAD, r % GROUP_PAD
    slot = tl.load(readers_ptr + member, mask=g < GROUP, other=-1).to(tl.int64)
    real, in_dim = slot >= 0, d < DIM
    length = tl.load(prompts_ptr + slot, mask=real, other=0).to(tl.int32)
    prompt = tl.load(pages_ptr + slot * pages_slot, mask=real, other=-1).to(tl.int32)  # a prompt is known by its first page
    mask = real[:, None] & in_dim[None, :]
    query = tl.load(q_ptr + slot[:, None] * q_slot + (head * GROUP + g)[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    top = tl.full([MEMBERS * GROUP_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([MEMBERS * GROUP_PAD], tl.float32)
    total = tl.zeros([MEMBERS * GROUP_PAD, DIM_PAD], tl.float32)
    last = tl.max(tl.where(length > 0, prompt, -1), axis=0)
    while last >= 0:
        same = (prompt == last) & (length > 0)
        own = tl.where(same, length, 0)
        tokens = tl.max(own, axis=0)
        table = pages_ptr + tl.max(tl.where(same, slot, 0), axis=0) * pages_slot
        blocks = tl.cdiv(tokens, BLOCK)
        share = tl.cdiv(blocks, PARTS - OWN)
        for block in range(split * share, tl.minimum((split + 1) * share, blocks)):
            start = block * BLOCK
            held = start + n < tokens
            page = tl.load(table + start // PAGE).to(tl.int64)
            places = ((page * HEADS + head) * PAGE + start % PAGE + n)[:, None] * DIM + d[None, :]
            top, weight, total = _attend_block(
                query, keys_ptr + places, values_ptr + places, held[:, None] & in_dim[None, :], (start + n)[None, :] < own[:, None],
                scale, softcap, top, weight, total, CAPPED, True, PRECISION,
            )  # fmt: skip
        last = tl.max(tl.where((length > 0) & (prompt < last), prompt, -1), axis=0)
    part = (slot * HEADS * GROUP + head * GROUP + g) * PARTS + OWN + split
    tl.store(parts_ptr + part[:, None] * DIM + d[None, :], total, mask=mask)
    tl.store(marks_ptr + part * 2, top, mask=real)
    tl.store(marks_ptr + part * 2 + 1, weight, mask=real)


@jit
def _combine(
    parts_ptr, marks_ptr, out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    s, d = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    part = row * SPLITS + s
    top = tl.load(marks_ptr + part * 2, mask=s < SPLITS, other=float("-inf"))
    weight = tl.load(marks_ptr + part * 2 + 1, mask=s < SPLITS, other=0.0)
    share = tl.exp(top - tl.max(top, axis=0))
    mask = (s < SPLITS)[:, None] & (d < DIM)[None, :]
    total = tl.load(parts_ptr + part[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    out = tl.sum(total * share[:, None], axis=0) / tl.sum(weight * share, axis=0)
    tl.store(out_ptr + row * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)
