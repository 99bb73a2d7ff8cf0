"""Select the tokens to keep, the best scores of each row in time order, in one launch instead of three sorts."""

# B rows, H kv heads, n scored tokens

from __future__ import annotations

import torch
from torch import Tensor

from .jit import jit, next_power_of_2, tl

MOST = 8192
"""Maximum number of scored tokens that one program can rank."""


def fused_choose(
    scores_BHn: Tensor, total: int, budget: int, sinks: int, protected_B: Tensor | None, rounding: float
) -> Tensor:
    """Return indices [B, H, budget], ascending, as `Policy.select` does: the first `sinks` and `protected` tokens, the tokens
    after the scored ones, and the best of the rest.

    The score at the cut is found bit by bit. Scores that are equal to it up to rounding are ties, and ties are transitive.
    Among ties, lower positions are kept.
    """
    rows, heads, scored = scores_BHn.shape
    scores = scores_BHn.contiguous()
    kept = torch.empty(rows, heads, budget, dtype=torch.int64, device=scores.device)
    _choose[(rows * heads,)](
        *(scores, scores if protected_B is None else protected_B, kept, heads, scored, total, budget, sinks, rounding),
        PROTECTED=protected_B is not None,
        PAD=next_power_of_2(scored),
        num_warps=4,
    )
    return kept


@jit
def _ordered(scores):
    """Map floats to integers with the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000


@jit(do_not_specialize=["scored", "total", "budget"])  # prompts have many lengths
def _choose(
    scores_ptr, protected_ptr, kept_ptr, heads, scored, total, budget, sinks, rounding,
    PROTECTED: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    real = i < scored
    scores = tl.load(scores_ptr + pair * scored + i, mask=real, other=float("-inf"))
    scores = tl.maximum(scores, -3.4028234663852886e38)
    stays = i < sinks
    if PROTECTED:
        stays = stays | (i < tl.load(protected_ptr + pair // heads))
    scores = tl.where(stays & real, float("inf"), scores)
    ordered = tl.where(real, _ordered(scores), -1)
    places = budget - (total - scored)

    cut = tl.zeros([], tl.int64)  # largest value that at least `places` scores reach
    bit = tl.full([], 0x80000000, tl.int64)
    for _ in range(32):
        tried = cut | bit
        cut = tl.where(tl.sum((ordered >= tried).to(tl.int32), axis=0) >= places, tried, cut)
        bit = bit >> 1
    at_cut = tl.min(tl.where(real & (ordered == cut), scores, float("inf")), axis=0)

    highest = at_cut
    above = tl.min(tl.where(real & (scores > highest), scores, float("inf")), axis=0)
    while (above < float("inf")) & (above - highest <= rounding * tl.abs(highest)):
        highest = above
        above = tl.min(tl.where(real & (scores > highest), scores, float("inf")), axis=0)
    lowest = at_cut
    below = tl.max(tl.where(real & (scores < lowest), scores, float("-inf")), axis=0)
    while (below > float("-inf")) & (lowest - below <= rounding * tl.abs(below)):
        lowest = below
        below = tl.max(tl.where(real & (scores < lowest), scores, float("-inf")), axis=0)

    better = real & (scores > highest)
    tied = real & (scores >= lowest) & (scores <= highest)
    left = places - tl.sum(better.to(tl.int32), axis=0)
    keep = better | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= left))
    place = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    row = kept_ptr + pair * budget
    tl.store(row + place, i.to(tl.int64), mask=keep)
    last = scored + i  # the window
    for start in range(0, total - scored, PAD):
        tl.store(row + places + start + i, (last + start).to(tl.int64), mask=last + start < total)
