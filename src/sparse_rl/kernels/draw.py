"""Draw one token per slot in one pass over its logits, compute its exact log-prob, and advance the slot.

The torch reference is `rollout.sampling.sample` with `counter_rng.uniform`: the draw inverts the cumulative distribution in
vocabulary order. The first launch sums the weights of each block of the vocabulary. The second launch finds the block of the
draw and reads only that block again. top_k and top_p add two launches in between: `nucleus` finds the kept tokens, and then
their weights are summed.
"""

# S slots, V vocabulary, B blocks and G groups of the vocabulary, n steps of a chunk

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, tl
from .nucleus import GROUP, Truncation, block_weights, find_cuts, stays

BLOCK = 4096


def draw_and_advance(
    logits_SV: Tensor,
    tokens_S: Tensor,
    positions_S: Tensor,
    lengths_S: Tensor,
    steps_S: Tensor,
    seeds_S: Tensor,
    last_S: Tensor,
    temperature_1: Tensor,
    sampled_nS: Tensor,
    logprobs_nS: Tensor,
    *,
    greedy: bool,
    truncation: Truncation | None = None,
) -> None:
    """Write the next token of each slot and its log-prob into row `steps` of the chunk, and set it as the slot's current
    token.

    All state is int64 and on the device. The position of a slot never exceeds `last`; a finished slot stays there. The
    log-prob is that of the untruncated softmax.
    """
    truncated = truncation is not None
    assert not (greedy and truncated)
    slots, vocab = logits_SV.shape
    blocks = -(-vocab // BLOCK)
    tops = torch.empty(slots, blocks, dtype=torch.float32, device=logits_SV.device)
    sums = torch.empty(slots, blocks, dtype=torch.float64, device=logits_SV.device)
    group_tops = (
        torch.empty(slots, blocks * BLOCK // GROUP, dtype=torch.float32, device=logits_SV.device) if truncated else tops
    )
    _sum_blocks[(slots, blocks)](
        *(logits_SV, logits_SV.stride(0), temperature_1, tops, sums, group_tops, vocab),
        BLOCK=BLOCK,
        GROUP=GROUP if truncated else 0,
        num_warps=8,
    )
    thresholds, last_ids, kept_sums = tops, tops, sums
    if truncation is not None:
        thresholds, last_ids = find_cuts(logits_SV, temperature_1, truncation, tops, sums, group_tops)
        kept_sums = torch.empty_like(sums)
        _sum_kept[(slots, blocks)](
            *(logits_SV, logits_SV.stride(0), temperature_1, tops, thresholds, last_ids, kept_sums, vocab),
            BLOCK=BLOCK,
            num_warps=8,
        )
    _draw[(slots,)](
        *(logits_SV, logits_SV.stride(0), temperature_1, tops, sums, thresholds, last_ids, kept_sums, vocab, blocks),
        *(tokens_S, positions_S, lengths_S, steps_S, seeds_S, last_S, sampled_nS, logprobs_nS, sampled_nS.stride(0)),
        BLOCK=BLOCK,
        BLOCKS_PAD=next_power_of_2(blocks),
        GREEDY=greedy,
        TRUNCATED=truncated,
        num_warps=8,
    )


@jit
def _sum_blocks(
    logits_ptr, row_stride, temperature_ptr, tops_ptr, sums_ptr, group_tops_ptr, vocab, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    slot, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr)
    logits = tl.load(logits_ptr + slot * row_stride + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    place = slot * tl.num_programs(1) + block
    if GROUP:
        group_tops = tl.max(tl.reshape(logits, (BLOCK // GROUP, GROUP)), axis=1)
        tl.store(group_tops_ptr + place * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), group_tops)
    logits = logits / temperature
    top = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - tl.maximum(top, -1e30)).to(tl.float64), axis=0)
    tl.store(tops_ptr + place, top)
    tl.store(sums_ptr + place, total)


@jit
def _sum_kept(
    logits_ptr, row_stride, temperature_ptr, tops_ptr, thresholds_ptr, last_ids_ptr, kept_sums_ptr, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the weights of the kept tokens in each block. Blocks without kept tokens are not read."""
    slot, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = slot * tl.num_programs(1) + block
    temperature, top = tl.load(temperature_ptr), tl.load(tops_ptr + place)
    threshold, last_id = tl.load(thresholds_ptr + slot), tl.load(last_ids_ptr + slot)
    total = tl.zeros([], tl.float64)
    if top >= threshold / temperature:
        v = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + slot * row_stride + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        weights = tl.exp(logits / temperature - tl.maximum(top, -1e30)).to(tl.float64)
        total = tl.sum(tl.where(stays(logits, v, threshold, last_id), weights, 0.0), axis=0)
    tl.store(kept_sums_ptr + place, total)


@jit
def _splitmix(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@jit
def _draw(
    logits_ptr, row_stride, temperature_ptr, tops_ptr, sums_ptr, thresholds_ptr, last_ids_ptr, kept_sums_ptr, vocab, blocks,
    tokens_ptr, positions_ptr, lengths_ptr, steps_ptr, seeds_ptr, last_ptr, sampled_ptr, logprobs_ptr, chunk_stride,
    BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr, GREEDY: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS_PAD)
    temperature = tl.load(temperature_ptr)
    tops = tl.load(tops_ptr + slot * blocks + b, mask=b < blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + slot * blocks + b, mask=b < blocks, other=0.0)
    top = tl.max(tops, axis=0)
    weights = tl.where(b < blocks, block_weights(tops, sums), 0.0)
    total = tl.sum(weights, axis=0)
    position = tl.load(positions_ptr + slot)

    v = tl.arange(0, BLOCK)
    if GREEDY:
        block = tl.min(tl.where(tops == top, b, BLOCKS_PAD), axis=0)
        block = tl.minimum(block, blocks - 1)  # out of range only if all logits are NaN; the log-prob below is then NaN
        inside = (
            tl.load(
                logits_ptr + slot * row_stride + block * BLOCK + v, mask=block * BLOCK + v < vocab, other=float("-inf")
            ).to(tl.float32)
            / temperature
        )
        place = tl.min(tl.where(inside == top, v, BLOCK - 1), axis=0)
    else:
        seed = tl.load(seeds_ptr + slot).to(tl.uint64)
        counter = (position + 1).to(tl.uint64)
        bits = _splitmix(_splitmix(seed) + counter) & 0x7FFFFFFFFFFFFFFF
        uniform = (bits >> 11).to(tl.int64).to(tl.float64) * 2.220446049250313e-16  # 2 ** -52
        if TRUNCATED:
            kept_sums = tl.load(kept_sums_ptr + slot * blocks + b, mask=b < blocks, other=0.0)
            weights = tl.where(b < blocks, block_weights(tops, kept_sums), 0.0)
        target = uniform * tl.sum(weights, axis=0)
        cumulative = tl.cumsum(weights, axis=0)
        block = tl.sum((cumulative <= target).to(tl.int32), axis=0)
        block = tl.minimum(block, tl.max(tl.where(weights > 0, b, 0), axis=0))  # last block with a positive weight
        before = tl.sum(tl.where(b < block, weights, 0.0), axis=0)
        inside = tl.load(
            logits_ptr + slot * row_stride + block * BLOCK + v, mask=block * BLOCK + v < vocab, other=float("-inf")
        ).to(tl.float32)
        if TRUNCATED:
            stay = stays(inside, block * BLOCK + v, tl.load(thresholds_ptr + slot), tl.load(last_ids_ptr + slot))
            inside = tl.where(stay, inside, float("-inf"))
        inside = inside / temperature
        inner = tl.cumsum(tl.exp(inside - top).to(tl.float64), axis=0)
        # The block's sum was rounded differently from the sum of its terms, so the target is rescaled to its share of the
        # block.
        weight = tl.sum(tl.where(b == block, weights, 0.0), axis=0)
        within = (target - before) / weight * tl.max(inner, axis=0)
        heavy = tl.max(tl.where(inside > float("-inf"), v, 0), axis=0)  # a larger index is possible only if all logits are NaN
        place = tl.minimum(tl.sum((inner <= within).to(tl.int32), axis=0), heavy)
    chosen = tl.sum(tl.where(v == place, inside, 0.0), axis=0)
    logprob = chosen - top - tl.log(total).to(tl.float32)
    token = tl.minimum(block * BLOCK + place, vocab - 1).to(tl.int64)

    step = tl.load(steps_ptr + slot)
    tl.store(sampled_ptr + step * chunk_stride + slot, token)
    tl.store(logprobs_ptr + step * chunk_stride + slot, logprob)
    tl.store(tokens_ptr + slot, token)
    tl.store(positions_ptr + slot, tl.minimum(position + 1, tl.load(last_ptr + slot)))
    tl.store(lengths_ptr + slot, tl.load(lengths_ptr + slot) + 1)
    tl.store(steps_ptr + slot, step + 1)
