"""Statistics of a model's queries before rotation, for policies that predict future queries."""

# L layers, Q query heads, N packed tokens, n of them used, F pairs of dimensions, D head dimension

from collections.abc import Sequence

import torch
from torch import Tensor

from .rotary import Rotary, from_pairs
from .statistics import Statistics

SKIPPED = 4
"""Number of first tokens of a sequence that are skipped, as in kvpress. Their queries are outliers."""


class QueryStatistics:
    """Collect the mean query E[q] and the mean length E|q_f| of each pair, per layer and query head. `covariance` adds the
    covariance of the queries. Sums are float64."""

    def __init__(self, rotary: Rotary, *, covariance: bool = False):
        self.rotary, self.covariance = rotary, covariance
        self.tokens: dict[int, int] = {}
        self.sums: dict[int, Statistics] = {}

    def add(self, layer: int, queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor, positions_1N: Tensor) -> None:
        used_n = _later_tokens(positions_1N[0])
        pairs_1QnF = self.rotary.unrotated(layer, queries_1QND[:, :, used_n], positions_1N[:, used_n])
        queries_QnD = from_pairs(pairs_1QnF, self.rotary.pairs_LF2[layer, None].to(pairs_1QnF.device))[0].double()
        new = {"query_mean": queries_QnD.sum(dim=1), "query_lengths": pairs_1QnF[0].abs().double().sum(dim=1)}
        if self.covariance:
            new["query_covariance"] = queries_QnD.mT @ queries_QnD
        self._add_sums(layer, len(used_n), new)

    def gathered(self) -> dict[int, tuple[int, Statistics]]:
        """Return the number of tokens and the sums of each layer."""
        return {
            layer: (self.tokens[layer], {name: each.cpu() for name, each in sums.items()}) for layer, sums in self.sums.items()
        }

    def combine(self, parts: Sequence[dict[int, tuple[int, Statistics]]]) -> None:
        self.tokens, self.sums = {}, {}
        for layer, (tokens, sums) in (pair for part in parts for pair in part.items()):
            self._add_sums(layer, tokens, sums)

    def _add_sums(self, layer: int, tokens: int, new: Statistics) -> None:
        so_far = self.sums.get(layer)
        self.sums[layer] = new if so_far is None else {name: so_far[name] + each for name, each in new.items()}
        self.tokens[layer] = self.tokens.get(layer, 0) + tokens

    def statistics(self) -> Statistics:
        layers = sorted(self.sums)
        means = {
            name: torch.stack([self.sums[layer][name] / self.tokens[layer] for layer in layers])
            for name in self.sums[layers[0]]
        }
        if self.covariance:
            mean_LQD = means["query_mean"]
            means["query_covariance"] -= mean_LQD[..., :, None] * mean_LQD[..., None, :]
        return {name: mean.float().cpu() for name, mean in means.items()} | {
            name: tensor[layers] for name, tensor in self.rotary.statistics().items()
        }


def _later_tokens(positions_N: Tensor) -> Tensor:
    """Return the tokens that are not among the first of their sequence; all tokens if there are no others.

    Packed sequences start where a position does not follow the one before it.
    """
    index_N = torch.arange(len(positions_N), device=positions_N.device)
    follows_N = torch.nn.functional.pad(positions_N.diff() == 1, (1, 0))
    start_N = index_N.masked_fill(follows_N, 0).cummax(dim=0).values
    later_n = torch.nonzero(index_N - start_N >= SKIPPED).flatten()
    return later_n if len(later_n) else index_N
