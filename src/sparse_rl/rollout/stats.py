"""Statistics of one call of `generate`, and its progress while it runs."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Stats:
    """Counts, times and memory of the engine's last `generate`."""

    tokens: int = 0
    """Response tokens in the rollouts, without those sampled after a stop."""
    prompt_tokens: int = 0
    """Prefilled prompt tokens. A prompt counts once per group, unless its samples evict different keys and wait for a slot."""
    seconds: float = 0.0
    """Wall-clock time of the whole call."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compaction_s: float = 0.0
    """Device time by part: decode from the first step of a chunk to its last, prefill and compaction with their launches."""
    compactions: int = 0
    """Compactions, counted per sequence, including the compression of long prompts."""
    steps: int = 0
    peak_kv_bytes: int = 0
    """Allocated bytes of keys and values. They never grow."""
    side_bytes: int = 0
    """Bytes of positions, lengths and the ring of queries."""
    scratch_bytes: int = 0
    """Peak bytes of keys and values of the packed prompts in one layer, or of a prompt whose samples wait for slots."""
    slot_steps: int = 0
    kept_tokens: int = 0
    """Tokens held, summed over decode steps and sequences."""
    dense_tokens: int = 0
    """Tokens a dense cache would have held at the same steps."""
    dense_peak_tokens: int = 0
    """Most tokens that a dense cache would have held at one moment, over all sequences."""

    def merged_with(self, other: "Stats") -> "Stats":
        """Combine the statistics of two engines that ran at the same time: counts add up, times and memory take the larger."""
        mine, theirs = vars(self), vars(other)
        return Stats(**{name: max(mine[name], theirs[name]) if name in LARGER else mine[name] + theirs[name] for name in mine})

    @property
    def host_s(self) -> float:
        """Seconds in which the device waited for the host or the host did its own work."""
        return max(0.0, self.seconds - self.prefill_s - self.decode_s - self.compaction_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def idle_share(self) -> float:
        """Share of slot steps in which the slot was empty or its sequence had ended."""
        return 1 - self._useful_steps / self.slot_steps if self.slot_steps else 0.0

    @property
    def token_savings(self) -> float:
        """1 - kept / dense over all decode steps and sequences."""
        return 1 - self.kept_tokens / self.dense_tokens if self.dense_tokens else 0.0

    _useful_steps: int = field(default=0, repr=False)

    def count_steps(self, taken: np.ndarray, held: np.ndarray, dense: np.ndarray) -> None:
        """Count `taken` steps of each sequence, which held `held` tokens before the first; a dense cache would have held
        `dense`."""
        grown = taken * (taken + 1) // 2
        self._useful_steps += int(taken.sum())
        self.kept_tokens += int((taken * held + grown).sum())
        self.dense_tokens += int((taken * dense + grown).sum())


LARGER = (
    "seconds", "prefill_s", "decode_s", "compaction_s", "steps", "peak_kv_bytes", "side_bytes", "scratch_bytes", "dense_peak_tokens"
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """Progress of `generate`, passed to the callback between chunks of steps."""

    finished: int
    total: int
    """Number of rollouts."""
    tokens: int
    seconds: float
    new: dict[int, list[np.ndarray]]
    """Response tokens sampled since the last call, by the rollout's index in the result."""
    ended: list[int]
    """Indices of the rollouts that ended since the last call."""
