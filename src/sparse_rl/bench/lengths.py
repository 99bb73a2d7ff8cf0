"""Draw response lengths for synthetic rollouts, and compute how many tokens a paged dense cache holds for them. All benchmarks
use this module."""

import random
from collections.abc import Sequence

from ..kernels.counter_rng import derive

SHORTEST = 8
GROUP = 8
"""Number of samples that share a prompt, as in training."""


def drawn_lengths(seeds: Sequence[int], longest: int) -> list[int]:
    """Return one length per rollout seed, uniform from one sixteenth of `longest` to `longest`. The mean is 53 % of
    `longest`."""
    low = max(1, min(SHORTEST, longest), longest // 16)
    return [random.Random(derive(seed, 7)).randint(low, longest) for seed in seeds]


def mean_response_tokens_held(lengths: Sequence[int]) -> float:
    """Return E[L^2] / (2 E[L]): the mean number of response tokens that a running dense sequence holds.

    A sequence of final length L runs for L steps and holds L / 2 tokens on average. Long sequences run longer, so they have
    more weight in the mean.
    """
    return sum(length * length for length in lengths) / (2 * sum(lengths))


def live_tokens(lengths: Sequence[int], prompt_tokens: int) -> float:
    """Return the tokens that a paged cache with shared prompts holds per running sequence, including its share of the
    prompt."""
    return mean_response_tokens_held(lengths) + prompt_tokens / GROUP
