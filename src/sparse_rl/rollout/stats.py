"""What a call of `generate` did and cost, and how far it is while it runs."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Stats:
    """Counts, times and memory of the engine's last `generate`."""

    tokens: int = 0
    """Response tokens in the rollouts; what was sampled after a stop does not count."""
    prompt_tokens: int = 0
    """Prefilled: each prompt once per group, unless its samples drop different keys of it and wait for a slot."""
    seconds: float = 0.0
    """Of the whole call, by the clock."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compaction_s: float = 0.0
    """By part, on the device's clock: decode from the first step of a chunk to its last, the others with their launches."""
    compactions: int = 0
    """Of single sequences, the compression of long prompts included."""
    steps: int = 0
    peak_kv_bytes: int = 0
    """Keys and values as allocated; they never grow."""
    side_bytes: int = 0
    """Positions, lengths and the ring of queries beside them."""
    scratch_bytes: int = 0
    """Keys and values of the packed prompts in one layer, and of a prompt that waits for more slots."""
    slot_steps: int = 0
    kept_tokens: int = 0
    """Tokens held, summed over decode steps and sequences."""
    dense_tokens: int = 0
    """Tokens a dense cache would have held at the same steps."""
    dense_peak_tokens: int = 0
    """The most tokens, over all sequences at one moment, that a dense cache would have held."""

    def beside(self, other: "Stats") -> "Stats":
        """Of two engines at work at the same time: counts add up, times and memory are those of the larger."""
        mine, theirs = vars(self), vars(other)
        return Stats(**{name: max(mine[name], theirs[name]) if name in LARGER else mine[name] + theirs[name] for name in mine})

    @property
    def host_s(self) -> float:
        """What the device spent waiting for the host, or the host on its own work."""
        return max(0.0, self.seconds - self.prefill_s - self.decode_s - self.compaction_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def idle_share(self) -> float:
        """Slots that were empty or finished, over all slots and steps."""
        return 1 - self._useful_steps / self.slot_steps if self.slot_steps else 0.0

    @property
    def token_savings(self) -> float:
        """1 - kept / dense over all decode steps and sequences."""
        return 1 - self.kept_tokens / self.dense_tokens if self.dense_tokens else 0.0

    _useful_steps: int = field(default=0, repr=False)

    def count_steps(self, taken: np.ndarray, held: np.ndarray, dense: np.ndarray) -> None:
        """`taken` steps of each sequence, which held `held` tokens before the first, where dense would have held `dense`."""
        grown = taken * (taken + 1) // 2
        self._useful_steps += int(taken.sum())
        self.kept_tokens += int((taken * held + grown).sum())
        self.dense_tokens += int((taken * dense + grown).sum())


LARGER = (
    "seconds", "prefill_s", "decode_s", "compaction_s", "steps", "peak_kv_bytes", "side_bytes", "scratch_bytes", "dense_peak_tokens"
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """Handed to the progress callback between chunks of steps."""

    finished: int
    total: int
    """Rollouts."""
    tokens: int
    seconds: float
    new: dict[int, list[np.ndarray]]
    """Pieces of responses sampled since the last call, by the rollout's place in the result."""
    ended: list[int]
    """Places of the rollouts that have ended since the last call."""
