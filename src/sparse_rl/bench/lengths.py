"""Draw lengths of synthetic responses, and compute what a paged dense cache holds of them. One rule for every benchmark."""

import random
from collections.abc import Sequence

from ..kernels.counter_rng import derive

SHORTEST = 8
GROUP = 8
"""Samples that share a prompt, as in training."""


def drawn_lengths(seeds: Sequence[int], longest: int) -> list[int]:
    """Return lengths that are uniform from a sixteenth of the longest to the longest, by the rollout's seed; the mean is 53
    %."""
    low = max(1, min(SHORTEST, longest), longest // 16)
    return [random.Random(derive(seed, 7)).randint(low, longest) for seed in seeds]


def mean_response_tokens_held(lengths: Sequence[int]) -> float:
    """Return E[L^2] / (2 E[L]): the mean number of response tokens a running dense sequence holds.

    A sequence of final length L runs for L steps and holds L / 2 tokens on average over them. Long sequences run for longer,
    so they weigh more.
    """
    return sum(length * length for length in lengths) / (2 * sum(lengths))


def live_tokens(lengths: Sequence[int], prompt_tokens: int) -> float:
    """Return the tokens that a paged cache with shared prompts holds for each running sequence, its share of a prompt included."""
    return mean_response_tokens_held(lengths) + prompt_tokens / GROUP
