"""TriAttention: keep the keys to which the mean query will attend from positions to come (arXiv 2604.04921).

Queries before rotation are concentrated around a mean, so the attention to a key follows from its distance alone. The policy
reads no recent queries. With a pair of dimensions f as a complex number, frequency ω_f, c_f = E[q_f], a_f = E|q_f|, stored key
K_f, next position t and offsets δ = 1, 2, 4, …, 2^16:

    score = mean over δ of Σ_f Re(c_f e^(i (t + δ) ω_f) conj K_f) + Σ_f (a_f - |c_f|) |K_f|

The first sum is the product of the stored key with one virtual query c_f e^(i t ω_f) mean_δ e^(i δ ω_f).
"""

# B rows, Q query heads, H kv heads, G query heads per kv head, T cached tokens, F pairs of dimensions, D head dimension, n
# offsets

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..query_statistics import QueryStatistics
from ..rotary import ROTARY, from_pairs, to_pairs, turns
from .base import Policy, next_positions

OFFSETS = 17
"""Number of offsets, which are powers of two."""


@dataclass(frozen=True)
class TriAttention(Policy):
    normalize: bool = False
    """Scale the scores of each query head to mean 0 and deviation 1 before the maximum over the heads of a kv head."""

    uses_values: ClassVar[bool] = False
    uses_statistics: ClassVar[tuple[str, ...]] = ("query_mean", "query_lengths", *ROTARY)

    def collector(self, rotary):
        return QueryStatistics(rotary)

    def scores(self, queries, keys, values, *, seeds=None, positions=None, layers=None, statistics=None):
        pairs_BF2 = statistics["rotary_pairs"][layers]
        frequencies_BF = statistics["rotary_frequencies"][layers]
        keys_BHTD = keys.float()
        centre_BQ1F = to_pairs(statistics["query_mean"][layers][:, :, None], pairs_BF2)
        offsets_n = 2 ** torch.arange(OFFSETS, dtype=torch.float64, device=keys.device)
        next_B1 = next_positions(keys, positions)[:, None].double()
        turn_BF = turns((next_B1 + offsets_n)[..., None] * frequencies_BF[:, None]).mean(dim=1)
        virtual_BQ1D = from_pairs(centre_BQ1F * turn_BF[:, None, None], pairs_BF2)
        spread_BQF = (statistics["query_lengths"][layers] - centre_BQ1F[:, :, 0].abs()).clamp(min=0)
        by_head = (keys.shape[1], -1)
        scores_BHGT = virtual_BQ1D.squeeze(2).unflatten(1, by_head) @ keys_BHTD.mT
        scores_BHGT += spread_BQF.unflatten(1, by_head) @ to_pairs(keys_BHTD, pairs_BF2).abs().mT
        if self.normalize:
            deviation_BHG1 = scores_BHGT.std(dim=-1, correction=0, keepdim=True).clamp(min=1e-6)
            scores_BHGT = (scores_BHGT - scores_BHGT.mean(dim=-1, keepdim=True)) / deviation_BHG1
        return scores_BHGT.amax(dim=2)
