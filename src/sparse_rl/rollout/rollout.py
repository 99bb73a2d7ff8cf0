"""The record of one sampled response: its tokens, their log-probs, and the keys that the sampler evicted."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..kv.trace import Trace

Finish = Literal["stop", "length", "repetition"]


@dataclass(frozen=True)
class Rollout:
    """One sampled response with its log-probs and evictions."""

    prompt: list[int]
    response: list[int]
    """Token ids, including the stop id."""
    logprobs: Tensor = field(repr=False)
    """float32 log-prob of each response token: untruncated softmax under the sparse policy at `temperature`."""
    finish: Finish
    kv_peak: int
    """Most tokens any layer and head held after prefill."""
    temperature: float
    """Temperature of the log-probs: the sampling temperature, or 1 if that was 0."""
    seed: int
    trace: Trace | None = field(repr=False, default=None)
    """Evictions; None if they were not recorded."""

    @property
    def evicted_at(self) -> Tensor | None:
        """Return int32 [layers, kv_heads, prompt + response]: the first position that does not see the key, else `NEVER`."""
        return None if self.trace is None else self.trace.evicted_at
