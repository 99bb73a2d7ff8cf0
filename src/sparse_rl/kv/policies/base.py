"""Base class of policies: score the competing keys, always keep the window and the sinks, and return the kept keys in time
order.

A policy is a frozen dataclass with one method, `scores`. It gets rotated queries and keys as they are stored in the cache. It
does not depend on a model, on slots or on the schedule. A policy that needs to know more about the model uses statistics.
"""

# queries [B, Q, W, D], keys and values [B, H, T, D], already rotated: B rows, Q query heads, H kv heads, W window,
# T cached tokens, D head dimension; n scored tokens

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import LongTensor, Tensor

from ...errors import UserError
from ...kernels.choose import MOST, fused_choose
from ...kernels.jit import usable
from ..rotary import Rotary
from ..statistics import Collector, Statistics

ROUNDING = 2e-6  # relative; scores closer than this differ only by summation order


@dataclass(frozen=True)
class Policy:
    """Keep `budget` of T keys in every row and kv head: the last `window`, the first `sinks`, and the highest-scoring of the
    rest."""

    window: int = 8
    """Number of final tokens that are always kept. If the policy uses queries, the scores are computed from theirs."""
    sinks: int = 0
    """Number of initial tokens that are always kept. They are scored like all other tokens."""

    uses_queries: ClassVar[bool] = False
    """True if `scores` reads the queries of the window. The cache then keeps them in a ring buffer."""
    uses_values: ClassVar[bool] = True
    """True if `scores` reads the values. If False, compaction does not copy them and passes None."""
    reads_rows: ClassVar[bool] = False
    """True if `scores` also accepts keys as `kernels.rows.Rows`. Compaction on a GPU then does not copy keys."""
    compares_keys: ClassVar[bool] = True
    """False if the order of two keys depends on neither other keys nor their number. Compaction then does not read stored
    prompts, which are always kept."""
    uses_seeds: ClassVar[bool] = False
    """True if `scores` reads the seed of the row. The samples of a prompt then drop different keys."""
    uses_statistics: ClassVar[tuple[str, ...]] = ()
    """Names of the statistics of the model that `scores` reads, which `collector` gathers. If there are any, `scores` also gets
    `statistics`, tensors by name with one entry per layer, on the keys' device, and `layers` [B], the entries of the rows."""
    full_precision: ClassVar[bool] = False
    """True if `scores` needs keys and values in the model's dtype. `kv.dtype` must then be auto."""
    evicts: ClassVar[bool] = True
    """False only in the built-in policy `full`, whose cache grows with the sequence. A custom policy must evict."""

    def __init_subclass__(cls) -> None:
        """Reset the flags that describe `scores` and `select` to their defaults in a class that overrides one of them."""
        super().__init_subclass__()
        if "scores" in cls.__dict__ or "select" in cls.__dict__:
            # A parent's flag says nothing about a new method. The defaults of Policy are correct for every method.
            for name in ("reads_rows", "uses_values", "compares_keys"):
                setattr(cls, name, cls.__dict__.get(name, getattr(Policy, name)))

    def __post_init__(self) -> None:
        if self.window < 0 or self.sinks < 0:
            raise ValueError(f"window = {self.window} and sinks = {self.sinks} are invalid: they must not be negative.")
        if self.uses_queries and self.window < 1:
            raise ValueError(f"{type(self).__name__} scores keys with the queries of the window: set window to at least 1.")

    def collector(self, rotary: Rotary) -> Collector:
        """Return a collector of the statistics that `scores` reads. `rotary` is the rotation of the model's queries and keys."""
        raise TypeError(f"{type(self).__name__} sets uses_statistics, so it must define collector().")

    def after(self, prompt: int) -> "Policy":
        """Return this policy for keys after `prompt` tokens, which are always kept and count as sinks."""
        if not self.sinks:
            return self
        policy = copy.copy(self)
        object.__setattr__(policy, "sinks", max(0, self.sinks - prompt))
        return policy

    def scores(
        self,
        queries: Tensor | None,
        keys: Any,
        values: Tensor | None,
        *,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return float scores [B, H, n] of the first n >= T - window keys. The keys with the highest scores are kept."""
        raise TypeError(f"{type(self).__name__} must define scores().")

    def select(
        self,
        queries: Tensor | None,
        keys: Any,
        values: Tensor | None,
        budget: int,
        *,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        protected: Tensor | None = None,
        layers: Tensor | None = None,
        statistics: Statistics | None = None,
    ) -> LongTensor:
        """Return the indices [B, H, budget] of the keys to keep, ascending. If T <= budget, return all indices.

        `seeds` [B] are the seeds of the rows, `positions` [B, H, T] are absolute, and `protected` [B] is the number of leading
        keys that are kept in addition to the sinks. Only policies with `uses_statistics` get `layers` and `statistics`. Ties go
        to the lower position (see `rank`).
        """
        rows, heads, total, _ = keys.shape
        index_T = torch.arange(total, device=keys.device)
        if total <= budget:
            return index_T.expand(rows, heads, total)  # type: ignore[return-value]
        competing = total - self.window
        if self.uses_statistics and not statistics:
            raise UserError(f"{type(self).__name__} needs statistics of the model: sample with an Engine, which gathers them.")
        more: dict[str, Any] = {"layers": layers, "statistics": statistics} if self.uses_statistics else {}
        scores_BHn = self.scores(queries, keys, values, seeds=seeds, positions=positions, **more)
        if scores_BHn.shape[:-1] != (rows, heads) or scores_BHn.shape[-1] < competing:
            raise UserError(
                f"{type(self).__name__}.scores returned shape {list(scores_BHn.shape)} for keys of shape {list(keys.shape)}: "
                f"return one score per row, kv head and token, {[rows, heads, total]}."
            )
        scores_BHn = scores_BHn[..., :competing].float()
        if usable(keys.device) and competing <= MOST:
            return fused_choose(scores_BHn, total, budget, self.sinks, protected, ROUNDING)  # type: ignore[return-value]
        forced_Bn = index_T[None, :competing] < self.sinks
        if protected is not None:
            forced_Bn = forced_Bn | (index_T[None, :competing] < protected[:, None])
        scores_BHn = scores_BHn.masked_fill(forced_Bn[:, None], torch.inf)
        best_BHn = rank(scores_BHn)[..., : budget - self.window]
        window_BHW = index_T[competing:].expand(rows, heads, self.window)
        return torch.cat([best_BHn.sort(dim=-1).values, window_BHW], dim=-1)  # type: ignore[return-value]


def next_positions(keys_BHTD: Tensor, positions_BHT: Tensor | None) -> Tensor:
    """Return the positions [B] of the next queries. The last cached key is that of the last token, in all heads."""
    if positions_BHT is None:
        return torch.full((keys_BHTD.shape[0],), keys_BHTD.shape[2], device=keys_BHTD.device)
    return positions_BHT[:, 0, -1] + 1


def rank(scores_BHn: Tensor) -> LongTensor:
    """Return indices [B, H, n] from best to worst. Ties go to the lower position.

    Adjacent scores that are equal up to rounding are ties, and ties are transitive. Ties are common: in the first layer, the
    keys of one token have the same norm at every position, and max pooling repeats its maximum. If the last bit decided, the
    selection would depend on the batch in which a sequence runs.
    """
    total = scores_BHn.shape[-1]
    scores_BHn = scores_BHn.clamp(min=torch.finfo(torch.float32).min)
    sorted_BHn, order_BHn = scores_BHn.sort(dim=-1, descending=True, stable=True)
    apart = sorted_BHn[..., :-1] - sorted_BHn[..., 1:] > ROUNDING * sorted_BHn[..., 1:].abs()
    tier_BHn = torch.nn.functional.pad(apart.cumsum(dim=-1), (1, 0))
    return (tier_BHn * total + order_BHn).sort(dim=-1).values % total  # type: ignore[return-value]
