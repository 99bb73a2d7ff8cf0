"""The record of one sampled response: what was said, how likely it was, and what the sampler could see."""

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
    """Token ids, the stop id included."""
    logprobs: Tensor = field(repr=False)
    """float32, one per response token: of the untruncated softmax under the sparse policy, at `temperature`."""
    finish: Finish
    kv_peak: int
    """Most tokens any layer and head held after prefill."""
    temperature: float
    """Of the log-probs: the sampling temperature, 1 where that was 0."""
    seed: int
    trace: Trace | None = field(repr=False, default=None)
    """The evictions, None where they were not recorded."""

    @property
    def evicted_at(self) -> Tensor | None:
        """int32 [layers, kv_heads, prompt + response]: the first position that does not see the key, else `NEVER`."""
        return None if self.trace is None else self.trace.evicted_at
