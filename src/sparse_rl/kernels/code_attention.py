"""One decode step of one layer over a cache of 8-bit or 4-bit codes. The kernels are in `attention_8bit.py` and
`attention_4bit.py`. If the slots are assigned to programs by their prompts, another launch reads a prompt once for several slots
(`prompt_codes.py`). If several programs share a row, a last launch combines their parts.

The torch reference is `SlotCache.append`, `SlotCache.read` and `attention.decode_attention`, or `attention.prompt_attention` and
`attention_part` with a prompt store.
"""

# S slots, Q query heads, H kv heads, C capacity, D head dimension, W window, d bytes of codes and g steps of a token in one head;
# stored prompts: see rows.py

from __future__ import annotations

import torch
from torch import Tensor

from .attention_4bit import _attend_4bit
from .attention_8bit import _attend_8bit
from .form import PLAIN, AttentionForm
from .jit import next_power_of_2, precision
from .prompt_codes import attend_prompts
from .rows import StoredCodes
from .slot_attention import _rows, combine, part_buffers

BLOCK = 64
"""Maximum number of tokens that a program reads at a time: a page of a stored prompt."""
QUERY_HEADS = 8
"""Maximum query heads of a program over 8-bit codes. Their coarse and fine codes fill the 16 rows of a matrix product."""


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
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Return the attention output [S, Q, D] of each slot's query over its prompt, its first `lengths` keys and the new key.

    `cached` are the codes of keys and of values [S, H, C, d], and the steps of both [S, H, C, g]. `centre` and `step` are the
    static scales of the channels of keys. The function writes the cache, the positions and the ring buffer in place. The caller
    increments the lengths at the end of the step.
    """
    slots, q_heads, dim = queries_SQD.shape
    kv_heads, capacity, width = cached[0].shape[1:]
    bits, steps = 8 if width == dim else 4, cached[2].shape[3]
    group, window, words = q_heads // kv_heads, ring_SQWD.shape[2], width // 2
    queries, keys, values = (_rows(tensor) for tensor in (queries_SQD, keys_SHD, values_SHD))
    out = torch.empty(slots, q_heads, dim, dtype=queries.dtype, device=queries.device)
    shared = prompts is not None and prompts.readers_AM is not None
    prompt_splits, parts, marks = part_buffers(out, kv_heads, splits, shared=shared)
    parts_of_row = splits + prompt_splits
    stored, table, pages_slot, page = cached, (lengths_S, lengths_S), 0, BLOCK
    if prompts is not None:
        stored, table = prompts.stored, (prompts.pages_SP, prompts.lengths_S)
        pages_slot, page = prompts.pages_SP.stride(0), prompts.stored[0].shape[2]
    options = {
        "GROUP": group,
        "HEADS": kv_heads,
        "DIM": dim,
        "WINDOW": window,
        "SPLITS": splits,
        "PARTS": parts_of_row,
        "STORED": prompts is not None and not shared,
        "SHIFTED": not form.is_plain,
        "CAPPED": form.softcap is not None,
        "SINKS": form.sinks_Q is not None,
        "PAGE": page,
        "PRECISION": precision(queries),
        "FLOAT32": queries.dtype == torch.float32,
    }
    words_pad = max(16, next_power_of_2(words))
    if bits == 8:
        kernel, (tokens, warps, stages) = _attend_8bit, _shape_8bit(dim)
        programs = -(-group // QUERY_HEADS)
        options |= {"GROUP_PAD": QUERY_HEADS, "PROGRAMS": programs, "DIM_PAD": 2 * words_pad, "WARPS": warps, "TOKENS": tokens}
    else:
        kernel, warps, stages, programs = _attend_4bit, 1, 3, 1  # the fastest of 22 on an H200
        options |= {"GROUP_PAD": max(16, next_power_of_2(group)), "WORDS": words, "WORDS_PAD": words_pad, "STEPS": steps}
        options |= {"STEPS_PAD": words_pad * steps // (2 * words), "BLOCK": BLOCK // 2}
        cached, stored = _in_words(cached), _in_words(stored)
    if prompts is not None and shared:
        static = (centre_HD, step_HD)
        attend_prompts(queries, prompts, _in_words(prompts.stored), static, parts, marks, prompt_splits, scale, form)
    kernel[(slots, kv_heads * programs, splits)](
        *(queries, keys, values, *cached, positions_SHC, ring_SQWD, *stored, *table, pages_slot),
        *(lengths_S, next_positions_S, centre_HD, step_HD, out, parts, marks, scale),
        *(1.0 if form.softcap is None else form.softcap, lengths_S if form.sinks_Q is None else form.sinks_Q),
        *(queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), capacity),
        **options,
        num_warps=warps,
        num_stages=stages,
    )
    if parts_of_row > 1:
        combine(parts, marks, out)
    return out


def _shape_8bit(dim: int) -> tuple[int, int, int]:
    """Return (tokens that a warp reads at a time, warps, stages), the fastest of 20 on an H200 for heads of 128 channels.

    Warps that share a program wait for each other, so one is faster. The sums of larger heads fill its registers.
    """
    return (BLOCK, 1, 2) if dim <= 128 else (16, 2, 2)


def _in_words(stored: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys, values, key_steps, value_steps = stored
    return keys.view(torch.int16), values.view(torch.int16), key_steps, value_steps
