"""TriAttention: keep the keys to which the mean query will attend from positions to come (arXiv 2604.04921).

Queries before rotation are concentrated around a mean, so the attention to a key follows from its distance alone. The policy
reads no recent queries. With a pair of dimensions f as a complex number, frequency ω_f, c_f = E[q_f], a_f = E|q_f|, stored key
K_f, next position t and offsets δ = 1, 2, 4, …, 2^16:

    score = mean over δ of Σ_f Re(c_f e^(i (t + δ) ω_f) conj K_f) + Σ_f (a_f - |c_f|) |K_f|

The first sum is the product of the stored key with one virtual query c_f e^(i t ω_f) mean_δ e^(i δ ω_f).
"""

# L layers, B rows, Q query heads, H kv heads, G query heads per kv head, T cached tokens, F pairs of dimensions, D head
# dimension, n offsets

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.jit import usable
from ...kernels.predicted import fused_logits
from ...kernels.rows import Rows
from ..query_statistics import QueryStatistics
from ..rotary import ROTARY, to_pairs, turns
from .base import Policy, next_positions

OFFSETS = 17
"""Number of offsets, which are powers of two."""


@dataclass(frozen=True)
class TriAttention(Policy):
    normalize: bool = False
    """Scale the scores of each query head to mean 0 and deviation 1 before the maximum over the heads of a kv head."""

    uses_values: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True
    uses_statistics: ClassVar[tuple[str, ...]] = ("query_mean", "query_lengths", *ROTARY)

    @property
    def compares_keys(self) -> bool:  # type: ignore[override]
        return self.normalize

    def collector(self, rotary):
        return QueryStatistics(rotary)

    def scores(self, queries, keys, values, *, seeds=None, positions=None, layers=None, statistics=None):
        pairs_BF2 = statistics["rotary_pairs"][layers]
        frequencies_BF = statistics["rotary_frequencies"][layers]
        centre_BQF = to_pairs(statistics["query_mean"][layers][:, :, None], pairs_BF2).squeeze(2)
        offsets_n1 = 2 ** torch.arange(OFFSETS, dtype=torch.float64, device=keys.device)[:, None]
        later_LF = turns(offsets_n1 * statistics["rotary_frequencies"][:, None]).mean(dim=1)
        turn_BF = turns(next_positions(keys, positions)[:, None].double() * frequencies_BF) * later_LF[layers]
        spread_BQF = (statistics["query_lengths"][layers] - centre_BQF.abs()).clamp(min=0)
        scores_BHGT = predicted_logits(centre_BQF * turn_BF[:, None], spread_BQF, keys, pairs_BF2)
        if self.normalize:
            deviation_BHG1 = scores_BHGT.std(dim=-1, correction=0, keepdim=True).clamp(min=1e-6)
            scores_BHGT = (scores_BHGT - scores_BHGT.mean(dim=-1, keepdim=True)) / deviation_BHG1
        return scores_BHGT.amax(dim=2)


def predicted_logits(virtual_BQF: Tensor, spread_BQF: Tensor, keys_BHTD: Tensor | Rows, pairs_BF2: Tensor) -> Tensor:
    """Return Σ_f Re(virtual_f conj K_f) + spread_f |K_f| of every key and query head, [B, H, G, T]."""
    if usable(keys_BHTD.device):
        rows = keys_BHTD if isinstance(keys_BHTD, Rows) else Rows.of(keys_BHTD)
        return fused_logits(virtual_BQF, spread_BQF, rows, pairs_BF2)
    keys_BHTD = keys_BHTD.take() if isinstance(keys_BHTD, Rows) else keys_BHTD
    by_head = (keys_BHTD.shape[1], -1)
    keys_BHTF = to_pairs(keys_BHTD.float(), pairs_BF2)
    virtual_BHGF, spread_BHGF = virtual_BQF.unflatten(1, by_head), spread_BQF.unflatten(1, by_head)
    logits_BHGT = virtual_BHGF.real @ keys_BHTF.real.mT + virtual_BHGF.imag @ keys_BHTF.imag.mT
    return logits_BHGT + spread_BHGF @ keys_BHTF.abs().mT
