"""Statistics and progress of one `generate` call."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..kv.prompt_store import PagePool
from ..sizes import PAGE_TOKENS


@dataclass
class Stats:
    """Counts, times and memory of the engine's last `generate` call."""

    tokens: int = 0
    """Response tokens in the rollouts, without tokens sampled after a stop token."""
    prompt_tokens: int = 0
    """Prefilled prompt tokens. A prompt counts once per group, unless its samples evict different keys and wait for a slot."""
    seconds: float = 0.0
    """Wall-clock time of the whole call."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compaction_s: float = 0.0
    """Device time of each phase in seconds. Decode counts from the first to the last step of a chunk; prefill and compaction
    include their launches."""
    compactions: int = 0
    """Number of compactions, counted per sequence and including the compression of long prompts."""
    steps: int = 0
    peak_kv_bytes: int = 0
    """Allocated bytes of keys and values, in slots and pages, which are constant during a call."""
    side_bytes: int = 0
    """Bytes of positions, lengths, the ring buffer of queries and page tables."""
    scratch_bytes: int = 0
    """Peak bytes of prefill's keys and values outside the cache: one layer of the packed prompts, all layers of a long prompt
    until it is compressed, or a prompt whose samples wait for slots."""
    slot_steps: int = 0
    kept_tokens: int = 0
    """Cached tokens, summed over decode steps and sequences."""
    dense_tokens: int = 0
    """Tokens that a dense cache would have held, summed over the same steps."""
    dense_peak_tokens: int = 0
    """Maximum number of tokens that a dense cache in pages would have held at one time: the responses so far of all running
    sequences, and the prompt of each group once."""
    pool_pages: int = 0
    """Pages of the prompt store, or of a dense cache; 0 if slots hold whole sequences."""
    peak_pages: int = 0
    """Maximum number of pages in use at one time."""
    pages_taken: int = 0
    """Pages taken, over the whole call."""
    page_tokens: int = 0
    """Tokens written to these pages."""
    page_steps: int = 0
    """Pages in use, summed over decode steps."""
    straggler_page_steps: int = 0
    """Pages of groups with one sample left, summed over decode steps."""
    preemptions: int = 0
    """Number of times that a dense sequence was paused because no page was free."""
    recomputed_tokens: int = 0
    """Tokens whose keys were computed again when paused sequences continued."""

    def merged_with(self, other: "Stats") -> "Stats":
        """Combine the statistics of two engines that ran concurrently. Counts are added; for times and memory the maximum is
        used."""
        mine, theirs = vars(self), vars(other)
        return Stats(
            **{name: max(mine[name], theirs[name]) if name in MERGED_BY_MAX else mine[name] + theirs[name] for name in mine}
        )

    @property
    def host_s(self) -> float:
        """Seconds of host work, including the time in which the device waited for the host."""
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
        """Share of cached tokens saved, 1 - kept / dense, over all decode steps and sequences."""
        return 1 - self.kept_tokens / self.dense_tokens if self.dense_tokens else 0.0

    @property
    def page_waste(self) -> float:
        """Share of the tokens of used pages that hold no token, because a prompt does not fill its last page."""
        return 1 - self.page_tokens / (self.pages_taken * PAGE_TOKENS) if self.pages_taken else 0.0

    @property
    def straggler_share(self) -> float:
        """Share of the used pages that belong to groups with one sample left, over all decode steps."""
        return self.straggler_page_steps / self.page_steps if self.page_steps else 0.0

    _useful_steps: int = field(default=0, repr=False)

    def count_pages(self, pages: PagePool, steps: int) -> None:
        """Count the pages in use during `steps` decode steps."""
        self.pool_pages, self.peak_pages = pages.pages, pages.peak
        self.pages_taken, self.page_tokens = pages.taken, pages.filled_tokens
        self.page_steps += steps * pages.used
        self.straggler_page_steps += steps * pages.straggler_pages

    def count_steps(self, taken: np.ndarray, held: np.ndarray, dense: np.ndarray) -> None:
        """Count `taken` steps of each sequence. `held` is the number of tokens it held before the first step, and `dense` the
        number in a dense cache."""
        grown = taken * (taken + 1) // 2
        self._useful_steps += int(taken.sum())
        self.kept_tokens += int((taken * held + grown).sum())
        self.dense_tokens += int((taken * dense + grown).sum())


MERGED_BY_MAX = (
    "seconds", "prefill_s", "decode_s", "compaction_s", "steps", "peak_kv_bytes", "side_bytes", "scratch_bytes",
    "dense_peak_tokens", "pool_pages", "peak_pages",
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """Progress of `generate`, passed to the callback between chunks of steps."""

    finished: int
    total: int
    """Total number of rollouts."""
    tokens: int
    seconds: float
    new: dict[int, list[np.ndarray]]
    """Response tokens sampled since the last callback, by the rollout's index in the result."""
    ended: list[int]
    """Indices of the rollouts that ended since the last callback."""
    abort: Callable[[int], None] = field(repr=False, default=lambda index: None)
    """Function that ends the rollout with this index, with `finish="abort"`. It keeps the tokens sampled so far; a rollout that
    waits for a slot ends with its first token."""
