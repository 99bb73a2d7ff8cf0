"""Who was evicted when: enough to rebuild, afterwards, what the sampler saw at every token."""

# L layers, H kv heads, T tokens of a sequence (prompt and response), N tokens dropped in one compaction

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = 2**31 - 1
"""Eviction time of a key that was never evicted."""


@dataclass(frozen=True)
class Trace:
    """Evictions of one sequence, one or two bytes a key: they happen only when the prompt ends or an interval is full."""

    codes_LHT: Tensor
    """0 is never; c > 0 is after (c - 1) * interval response tokens had entered the cache."""
    prompt_tokens: int
    interval: int

    @property
    def evicted_at(self) -> Tensor:
        """int32 [L, H, T]: the position of the first query that does not see the key, `NEVER` where it was kept."""
        codes = self.codes_LHT.to(torch.int32)
        times = self.prompt_tokens + (codes - 1) * self.interval
        return torch.where(codes == 0, torch.tensor(NEVER, dtype=torch.int32), times.to(torch.int32))


class TraceRecorder:
    """Collects the compactions of one running sequence."""

    def __init__(self, prompt_tokens: int, interval: int):
        self.prompt_tokens = prompt_tokens
        self.interval = interval
        self._events: list[tuple[int, Tensor]] = []

    def record(self, entered: int, dropped_LHN: Tensor) -> None:
        """Positions dropped after `entered` response tokens had entered, 0 for the compression of the prompt; on the host,
        or on their way there until the device is waited for."""
        self._events.append((entered // self.interval + 1, dropped_LHN))

    def finish(self, layers: int, kv_heads: int, tokens: int) -> Trace:
        last_code = self._events[-1][0] if self._events else 0
        dtype = next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if last_code <= torch.iinfo(dtype).max)
        codes_LHT = torch.zeros(layers, kv_heads, tokens, dtype=dtype)
        if self._events:
            dropped_LHN = torch.cat([dropped for _, dropped in self._events], dim=2).long()
            code_N = torch.tensor([code for code, dropped in self._events for _ in range(dropped.shape[2])], dtype=dtype)
            codes_LHT.scatter_(2, dropped_LHN, code_N.expand_as(dropped_LHN))
        return Trace(codes_LHT, self.prompt_tokens, self.interval)
