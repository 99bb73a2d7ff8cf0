"""Trace of evictions: the data needed to reconstruct which keys the sampler saw at every token."""

# L layers, H kv heads, T tokens of a sequence (prompt and response), N tokens dropped in one compaction of n sequences

from collections.abc import Callable

import torch
from torch import Tensor

NEVER = 2**31 - 1
"""Eviction time of a key that was never evicted."""


class Trace:
    """Evictions of one sequence, in one or two bytes per key. Evictions occur only at the end of the prompt and of an
    interval.

    `codes_LHT` is 0 for a key that was never evicted. A code c > 0 means that the key was evicted after (c - 1) * interval
    response tokens had entered the cache. `codes_LHT` may be a function, which is called when the codes are first read,
    because most rollouts are never replayed.
    `absent` lists the layers without codes: sliding-window layers, whose window determines which keys a query sees, and layers
    without attention.
    """

    def __init__(
        self,
        codes_LHT: Tensor | Callable[[], Tensor],
        prompt_tokens: int,
        interval: int,
        absent: tuple[int, ...] = (),
    ):
        self._codes, self.prompt_tokens, self.interval, self.absent = codes_LHT, prompt_tokens, interval, absent

    @property
    def codes_LHT(self) -> Tensor:
        if not isinstance(self._codes, Tensor):
            self._codes = self._codes()
        return self._codes

    def __getstate__(self) -> dict:
        return {**vars(self), "_codes": self.codes_LHT}

    @property
    def evicted_at(self) -> Tensor:
        """int32 [L, H, T]: position of the first query that does not see the key, or `NEVER` if it was kept. The
        keys of sliding-window layers are never evicted."""
        codes = self.codes_LHT.to(torch.int32)
        times = self.prompt_tokens + (codes - 1) * self.interval
        times_LHT = torch.where(codes == 0, torch.tensor(NEVER, dtype=torch.int32), times.to(torch.int32))
        if not self.absent:
            return times_LHT
        layers = len(times_LHT) + len(self.absent)
        all_LHT = torch.full((layers, *times_LHT.shape[1:]), NEVER, dtype=torch.int32)
        all_LHT[[layer for layer in range(layers) if layer not in self.absent]] = times_LHT
        return all_LHT


class TraceRecorder:
    """Collects the compactions of one running sequence."""

    def __init__(self, prompt_tokens: int, interval: int):
        self.prompt_tokens = prompt_tokens
        self.interval = interval
        self._events: list[tuple[int, Tensor, int]] = []

    def record(self, entered: int, dropped_LnHN: Tensor, index: int = 0) -> None:
        """Record positions that were dropped after `entered` response tokens had entered the cache; 0 means prompt
        compression.

        `index` is the index of this sequence among those compacted with it.
        """
        self._events.append((entered // self.interval + 1, dropped_LnHN, index))

    def finish(self, layers: int, kv_heads: int, tokens: int, absent: tuple[int, ...] = ()) -> Trace:
        """Return the trace. `layers` is the number of layers that are not absent."""
        events = self._events

        def codes() -> Tensor:
            last_code = events[-1][0] if events else 0
            dtype = next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if last_code <= torch.iinfo(dtype).max)
            codes_LHT = torch.zeros(layers, kv_heads, tokens, dtype=dtype)
            if events:
                dropped_LHN = torch.cat([dropped[:, index] for _, dropped, index in events], dim=2).long()
                code_N = torch.tensor([code for code, dropped, _ in events for _ in range(dropped.shape[3])], dtype=dtype)
                codes_LHT.scatter_(2, dropped_LHN, code_N.expand_as(dropped_LHN))
            return codes_LHT

        return Trace(codes, self.prompt_tokens, self.interval, absent)
