"""Expected attention: keep the keys with the largest expected attention weight, times the norm of the value (arXiv 2510.00636).

Future queries are Gaussian before rotation, with mean μ and covariance Σ per query head. R is the mean rotation over the next
`future` positions, and k a stored key. As in kvpress:

    score = (mean over query heads of softmax(k·Rμ / √D + kᵀ R Σ Rᵀ k / 2D) + epsilon) * ‖v‖

Here keys are turned by Rᵀ instead of queries by R, and scores are logarithms, which do not underflow.
"""

# B rows, H kv heads, G query heads per kv head, T cached tokens, F pairs of dimensions, D head dimension

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..query_statistics import QueryStatistics
from ..rotary import ROTARY, from_pairs, to_pairs, turns
from .base import Policy, next_positions

SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    future: int = 512
    """Number of future positions over which the rotation is averaged."""
    epsilon: float = 0.0
    """Added to the expected weight. A larger value gives the norm of the value more influence."""

    uses_statistics: ClassVar[tuple[str, ...]] = ("query_mean", "query_covariance", *ROTARY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.future, int) or self.future < 1:
            raise ValueError(f"future = {self.future!r} is invalid: it must be a positive number of tokens, such as 512.")
        if self.epsilon < 0:
            raise ValueError(f"epsilon = {self.epsilon} is invalid: it must not be negative.")

    def collector(self, rotary):
        return QueryStatistics(rotary, covariance=True)

    def scores(self, queries, keys, values, *, seeds=None, positions=None, layers=None, statistics=None):
        pairs_BF2, dim = statistics["rotary_pairs"][layers], keys.shape[-1]
        turn_BF = self._mean_turn(next_positions(keys, positions), statistics["rotary_frequencies"][layers])
        keys_BHTD = from_pairs(to_pairs(keys.float(), pairs_BF2) * turn_BF[:, None, None].conj(), pairs_BF2)
        by_head = (keys.shape[1], -1)
        logits_BHGT = statistics["query_mean"][layers].unflatten(1, by_head) @ keys_BHTD.mT / dim**0.5
        covariance_LHGDD = statistics["query_covariance"].unflatten(1, by_head)
        for group in range(logits_BHGT.shape[2]):  # one head at a time, for memory
            covariance_BHDD = covariance_LHGDD[layers, :, group]
            logits_BHGT[:, :, group] += ((keys_BHTD @ covariance_BHDD) * keys_BHTD).sum(dim=-1) / (2 * dim)
        weights_BHT = logits_BHGT.log_softmax(dim=-1).logsumexp(dim=2) - math.log(logits_BHGT.shape[2])
        if self.epsilon:
            weights_BHT = weights_BHT.logaddexp(weights_BHT.new_full((), math.log(self.epsilon)))
        return weights_BHT + values.float().norm(dim=-1).clamp(min=SMALLEST).log()

    def _mean_turn(self, next_B: Tensor, frequencies_BF: Tensor) -> Tensor:
        """Return the mean of e^(i p ω) over the next n positions p: e^(i c ω) sin(nω/2) / (n sin(ω/2)) with their centre c."""
        half_BF, n = frequencies_BF / 2, self.future
        length_BF = torch.where(half_BF == 0, 1.0, (n * half_BF).sin() / (n * half_BF.sin()))
        return length_BF.float() * turns((next_B[:, None].double() + (n - 1) / 2) * frequencies_BF)
