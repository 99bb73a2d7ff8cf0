"""Record of one sampled response: its tokens, their log-probs, and the keys that the sampler evicted."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..kv.storage import Quantiser
from ..kv.trace import Trace
from ..models.routing import ExpertChoices

Finish = Literal["stop", "length", "repetition", "abort"]


@dataclass(frozen=True)
class Rollout:
    """One sampled response with its log-probs and evictions."""

    prompt: list[int]
    response: list[int]
    """Token ids, including the stop id."""
    logprobs: Tensor = field(repr=False)
    """float32 log-prob of each response token, from the untruncated softmax under the sparse policy at `temperature`."""
    finish: Finish
    kv_peak: int
    """Maximum number of tokens that any layer and head held after prefill."""
    temperature: float
    """Temperature of the log-probs: the sampling temperature, or 1 for greedy sampling."""
    seed: int
    trace: Trace | None = field(repr=False, default=None)
    """Recorded evictions; None if evictions were not recorded."""
    quantiser: Quantiser | None = field(repr=False, default=None)
    """Storage of keys and values in 8 or 4 bits; None for the model's dtype."""
    routing: ExpertChoices | None = field(repr=False, default=None)
    """Experts that the sampler's routers chose; None if they were not recorded. Replay and training use them."""

    @property
    def evicted_at(self) -> Tensor | None:
        """int32 [layers, kv_heads, prompt + response]: first position that does not see the key, or `NEVER` if it
        was kept."""
        return None if self.trace is None else self.trace.evicted_at
