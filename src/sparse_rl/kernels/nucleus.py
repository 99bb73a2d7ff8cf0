"""Find the top_k and top_p cut in a row of logits without sorting the row.

The torch reference is `rollout.sampling.truncate`: keep the top_k largest (0: all), and of those the smallest set whose
probability reaches top_p. Ties go to lower ids. A cut consists of the smallest kept logit and the last kept id among equal
logits.

A nucleus usually has few tokens, so most of the row is read only once. The largest logits of small groups of the vocabulary
give a lower bound of the cut. The search then reads only the groups that reach this bound.
"""

# S slots, V vocabulary, G groups and B blocks of the vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, tl

GROUP = 128
TILE, WARPS = 4096, 16
"""Number of logits that a program reads at a time, and its number of warps."""
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are always 0 in a float32 converted from this dtype. The search skips them."""


@dataclass(frozen=True)
class Truncation:
    """top_k and top_p as device tensors, so that one CUDA graph works for all values."""

    top_k_1: Tensor
    """int64; 0 keeps all tokens."""
    top_p_1: Tensor
    """float64; 1 keeps all tokens."""


def find_cuts(
    logits_SV: Tensor, temperature_1: Tensor, truncation: Truncation, tops_SB: Tensor, sums_SB: Tensor, group_tops_SG: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the smallest kept logit [S], and the last kept id [S] among the logits equal to it.

    `tops_SB` is each block's largest logit divided by the temperature. `sums_SB` is the sum of the block's weights relative to
    that logit. `group_tops_SG` is each group's largest logit, not divided by the temperature.
    """
    slots, vocab = logits_SV.shape
    blocks, groups = tops_SB.shape[1], group_tops_SG.shape[1]
    thresholds = torch.empty(slots, dtype=torch.float32, device=logits_SV.device)
    last_ids = torch.empty(slots, dtype=torch.int32, device=logits_SV.device)
    listed = torch.empty(slots, groups, dtype=torch.int32, device=logits_SV.device)
    _cut[(slots,)](
        *(logits_SV, logits_SV.stride(0), temperature_1, truncation.top_k_1, truncation.top_p_1),
        *(tops_SB, sums_SB, group_tops_SG, listed, thresholds, last_ids, vocab, blocks, groups),
        BLOCKS_PAD=next_power_of_2(blocks),
        GROUPS_PAD=next_power_of_2(groups),
        GROUP=GROUP,
        TILE=TILE,
        UNUSED=UNUSED_BITS[logits_SV.dtype],
        num_warps=WARPS,
    )
    return thresholds, last_ids


@jit
def block_weights(tops, sums):
    """Return the sums of the blocks relative to the largest logit of the row."""
    return sums * tl.exp(tl.maximum(tops, -1e30) - tl.max(tops, axis=0)).to(tl.float64)


@jit
def stays(logits, ids, threshold, last_id):
    return (logits > threshold) | ((logits == threshold) & (ids <= last_id))


@jit
def _ordered(logits, UNUSED: tl.constexpr):
    """Map floats to integers with the same order; 0.0 and -0.0 are equal."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNUSED


@jit
def _cut(
    logits_ptr, row_stride, temperature_ptr, top_k_ptr, top_p_ptr,
    tops_ptr, sums_ptr, group_tops_ptr, listed_ptr, thresholds_ptr, last_ids_ptr, vocab, blocks, groups,
    BLOCKS_PAD: tl.constexpr, GROUPS_PAD: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row_ptr, listed_ptr = logits_ptr + slot * row_stride, listed_ptr + slot * groups
    temperature, top_k, top_p = tl.load(temperature_ptr), tl.load(top_k_ptr), tl.load(top_p_ptr)
    b, g = tl.arange(0, BLOCKS_PAD), tl.arange(0, GROUPS_PAD)
    tops = tl.load(tops_ptr + slot * blocks + b, mask=b < blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + slot * blocks + b, mask=b < blocks, other=0.0)
    total = tl.sum(block_weights(tops, sums), axis=0)
    group_tops = tl.load(group_tops_ptr + slot * groups + g, mask=g < groups, other=float("-inf"))
    top = tl.max(group_tops, axis=0)

    low = _lower_bound(group_tops, top, total, temperature, top_k, top_p, vocab)
    near = (group_tops >= low) & (group_tops > float("-inf"))
    tl.store(listed_ptr + tl.cumsum(near.to(tl.int32), axis=0) - 1, g, mask=near)
    tl.debug_barrier()  # threads read groups that other threads listed
    row = (row_ptr, listed_ptr, tl.sum(near.to(tl.int32), axis=0), vocab, temperature, top)

    threshold, last_id = tl.full([], float("-inf"), tl.float32), tl.full([], -1, tl.int32)
    if top_k > 0:
        threshold, last_id = _search(
            row, low, threshold, last_id, top_k.to(tl.float64), COUNT=True, GROUP=GROUP, TILE=TILE, UNUSED=UNUSED
        )
        total = _sum(row, threshold, last_id, GROUP=GROUP, TILE=TILE)
        low = tl.maximum(low, threshold)
    if top_p < 1:
        threshold, last_id = _search(
            row, low, threshold, last_id, top_p * total, COUNT=False, GROUP=GROUP, TILE=TILE, UNUSED=UNUSED
        )
    tl.store(thresholds_ptr + slot, threshold)
    tl.store(last_ids_ptr + slot, last_id)


@jit
def _lower_bound(group_tops, top, total, temperature, top_k, top_p, vocab):
    """Return a logit that is not above the cut. The largest logits of the groups at or above this logit already reach top_k or
    top_p.

    If there is no such logit, return a bound: tokens with a probability below (1 - top_p) / V together hold less than 1 -
    top_p. The bound is halved to allow for rounding.
    """
    counted = top_k > 0
    weights = tl.exp(group_tops / temperature - top / temperature).to(tl.float64)
    weights = tl.where(counted, (group_tops > float("-inf")).to(tl.float64), weights)
    target = tl.where(counted, top_k.to(tl.float64), top_p * total)
    tail = top + temperature * tl.log(tl.maximum(1 - top_p, 1e-30) * total / (2 * vocab)).to(tl.float32)
    low = tl.where(counted, float("-inf"), tail)
    near, far = 0.0 * temperature, 64.0 * temperature
    for _ in range(14):
        middle = (near + far) / 2
        enough = tl.sum(tl.where(group_tops >= top - middle, weights, 0.0), axis=0) >= target
        low = tl.where(enough, tl.maximum(low, top - middle), low)
        near, far = tl.where(enough, near, middle), tl.where(enough, middle, far)
    return low


@jit
def _tile(row, start, threshold, last_id, COUNT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return ids, logits and weights of some listed groups; for a count the weights are 1. Tokens removed by an earlier cut
    have weight 0."""
    row_ptr, listed_ptr, listed, vocab, temperature, top = row
    i = tl.arange(0, TILE)
    place = start + i // GROUP
    ids = tl.load(listed_ptr + place, mask=place < listed, other=0) * GROUP + i % GROUP
    logits = tl.load(row_ptr + ids, mask=(place < listed) & (ids < vocab), other=float("-inf")).to(tl.float32)
    if COUNT:
        weights = (logits > float("-inf")).to(tl.float64)
    else:
        weights = tl.exp(logits / temperature - top / temperature).to(tl.float64)
    return ids, logits, tl.where(stays(logits, ids, threshold, last_id), weights, 0.0)


@jit
def _sum(row, threshold, last_id, GROUP: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, row[2], TILE // GROUP):
        _, _, weights = _tile(row, start, threshold, last_id, COUNT=False, GROUP=GROUP, TILE=TILE)
        total += weights
    return tl.sum(total, axis=0)


@jit
def _search(
    row, lowest, threshold, last_id, target,
    COUNT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """Return the cut at which the weights, summed from the largest logit downwards, reach `target`. Tokens removed by an
    earlier cut do not count."""
    top, listed = row[5], row[2]
    low, high = _ordered(lowest, UNUSED).to(tl.int64), _ordered(top, UNUSED).to(tl.int64) + 1
    above = tl.zeros([], tl.float64)  # total weight from `high` upwards, which is below the target
    while high - low > 1:  # each iteration keeps a quarter of the range
        first = low + tl.maximum((high - low) // 4, 1)
        second, third = low + (high - low) // 2, low + (high - low) * 3 // 4
        sum_1, sum_2, sum_3 = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
        for start in range(0, listed, TILE // GROUP):
            _, logits, weights = _tile(row, start, threshold, last_id, COUNT=COUNT, GROUP=GROUP, TILE=TILE)
            keys = _ordered(logits, UNUSED)
            sum_1 += tl.where(keys >= first.to(tl.int32), weights, 0.0)
            sum_2 += tl.where(keys >= second.to(tl.int32), weights, 0.0)
            sum_3 += tl.where(keys >= third.to(tl.int32), weights, 0.0)
        from_1, from_2, from_3 = tl.sum(sum_1, axis=0), tl.sum(sum_2, axis=0), tl.sum(sum_3, axis=0)
        if from_3 >= target:
            low = third
        elif from_2 >= target:
            low, high, above = second, third, from_3
        elif from_1 >= target:
            low, high, above = first, second, from_2
        else:
            high, above = first, from_1

    at_cut, last_tie, ties = tl.full([], float("-inf"), tl.float32), tl.full([], -1, tl.int32), tl.zeros([], tl.int32)
    for start in range(0, listed, TILE // GROUP):
        ids, logits, weights = _tile(row, start, threshold, last_id, COUNT=COUNT, GROUP=GROUP, TILE=TILE)
        tied = (_ordered(logits, UNUSED) == low.to(tl.int32)) & (weights > 0)
        before = ties + tl.cumsum(tied.to(tl.int32), axis=0) - 1
        stay = tied & (above + before.to(tl.float64) * weights < target)
        at_cut = tl.maximum(at_cut, tl.max(tl.where(stay, logits, float("-inf")), axis=0))
        last_tie = tl.maximum(last_tie, tl.max(tl.where(stay, ids, -1), axis=0))
        ties += tl.sum(tied.to(tl.int32), axis=0)
    return at_cut, last_tie
