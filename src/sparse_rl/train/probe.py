"""Measure before the first step how far quantised keys and values change the model. Warn, or refuse a model that they ruin."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..config import PRESETS, Sampling
from ..errors import UserError
from ..learner.mismatch import measure
from ..learner.replay import replay
from ..rollout.engine import Engine
from ..rollout.rollout import Rollout
from ..world import ALONE, World

ROLLOUTS, TOKENS = 8, 128
"""Rollouts of a probe, and maximum response tokens of each."""
WARNED_K3 = 0.02
"""A run warns if k3 of quantisation exceeds this. R-KV with protected prompts and a budget of half the response is similar."""
REFUSED_K3 = 0.5
"""A run is refused if k3 exceeds this: a typical ratio is then beyond the bounds of most corrections."""
REFUSED_SHARE = 0.5
"""A run is refused if this share of rollouts or more is rejected."""


@dataclass(frozen=True)
class Probe:
    """Mismatch of quantisation alone: ratio = pi_dense / pi_quantised."""

    dtype: str
    k3: float
    xi_p05: float
    rejected: float

    @property
    def sentence(self) -> str:
        return (
            f"kv.dtype = {self.dtype} without eviction: mismatch k3 {self.k3:.2g}, 5th percentile of the ratio "
            f"{self.xi_p05:.2f}, {self.rejected:.0%} of rollouts rejected"
        )

    @property
    def remedy(self) -> str:
        return "set kv.dtype = 8bit or auto" if self.dtype == "4bit" else "set kv.dtype = auto"

    def warning(self) -> str | None:
        """Return a warning if the mismatch is large; else None. Raise UserError if it ruins the model."""
        if self.k3 > REFUSED_K3 or self.rejected >= REFUSED_SHARE or not self.k3 < float("inf"):
            raise UserError(f"{self.sentence}. Quantisation ruins this model: {self.remedy}.")
        return f"{self.sentence}. For less, {self.remedy}." if self.k3 > WARNED_K3 or self.rejected else None


@torch.no_grad()
def probe(
    engine: Engine, model: PreTrainedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, most: int, samples: int
) -> Probe:
    """Sample a few short responses and measure their mismatch.

    `most` is the prompts per step and `samples` the samples per prompt, for which the cache is reserved.
    """
    count = min(most, -(-ROLLOUTS // samples))
    asked = prompts[:: -(-len(prompts) // count)]
    short = sampling.changed(max_tokens=min(TOKENS, sampling.max_tokens))
    rollouts = engine.generate(asked, samples, short, record=False)
    return measured(engine, model, rollouts)


@torch.no_grad()
def measured(engine: Engine, model: PreTrainedModel, rollouts: list[Rollout], world: World = ALONE) -> Probe:
    """Compare the log-probs of these responses, on all ranks, with stored and with unquantised keys and values."""
    dense, stored = (replay(model, rollouts, view) for view in ("dense", "quantised"))
    own = [(all_keys - codes).cpu() for all_keys, codes in zip(dense, stored, strict=True)]
    metrics = measure([each for part in world.gather(own) for each in part], PRESETS["paper"]).metrics
    return Probe(engine.kv.dtype, metrics["sparse/mismatch_k3"], metrics["sparse/xi_p05"], metrics["sparse/rejection_rate"])
