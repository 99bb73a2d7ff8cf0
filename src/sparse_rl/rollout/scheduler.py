"""Assign slots: requests wait in order, active sequences occupy the first slots, and a finished sequence frees its slot.

The scheduler runs on the host and uses plain integers. The active slots are always 0 to n - 1, so a step processes the front
of the cache and no idle slots.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..kv.trace import TraceRecorder
from .repetition import RepetitionGuard
from .request import Request
from .rollout import Finish


@dataclass
class Sequence:
    """A rollout in progress."""

    request: Request
    held: int
    """Tokens in the cache, per layer and head."""
    trace: TraceRecorder | None
    """Recorder of the evictions, if the request asks for them."""
    guard: RepetitionGuard | None = None
    entered: int = 0
    """Response tokens whose keys have entered the cache, including those of steps after the end."""
    tokens: int = 0
    """Number of response tokens so far."""
    last_token: int = -1
    pieces: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Tokens and log-probs of the response, one pair per chunk. They are views of the arrays copied from the device."""
    finish: Finish | None = None
    kv_peak: int = 0

    @property
    def position(self) -> int:
        """Position of the next token to feed."""
        return len(self.request.prompt) + self.entered

    @property
    def last_position(self) -> int:
        """Position of the last token that may be fed. Steps after it could exceed the positions that the model supports."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - self.tokens

    def take(self, tokens: np.ndarray, logprobs: np.ndarray, stop_at: int, repeats_at: int) -> int:
        """Append sampled tokens up to the end of the rollout and return how many were taken. `stop_at` is the index of the
        first stop token and `repeats_at` that of the first repetition; each is the number of tokens if there is none."""
        if stop_at == repeats_at == len(tokens) < self.remaining:  # fast path: most chunks end no sequence
            self.pieces.append((tokens, logprobs))
            self.tokens += stop_at
            self.last_token = int(tokens[-1])
            return stop_at
        taken = min(stop_at + 1, len(tokens), self.remaining)
        if repeats_at < min(taken, stop_at):
            taken, self.finish = repeats_at + 1, "repetition"
        self.pieces.append((tokens[:taken], logprobs[:taken]))
        self.tokens += taken
        self.last_token = int(tokens[taken - 1])
        if stop_at < taken:
            self.finish = "stop"
        elif self.finish is None and not self.remaining:
            self.finish = "length"
        return taken

    def response(self) -> tuple[list[int], np.ndarray]:
        """Return the tokens and their log-probs."""
        tokens, logprobs = zip(*self.pieces, strict=True)
        return np.concatenate(tokens).tolist(), np.concatenate(logprobs)


class Scheduler:
    def __init__(self, requests: list[Request], slots: int, refill: int = 1, more: Callable[[], list[Request]] | None = None):
        """Queue the requests.

        While sequences run, new ones enter only if `refill` slots are free, or enough slots for all that wait. If there is
        room, `more` is called for another group until it returns an empty list.
        """
        self.slots, self.refill, self.more = slots, refill, more
        self.waiting = deque(requests)
        self.active: list[Sequence] = []

    def has_work(self) -> bool:
        """Call `more` for requests if there is room. Return whether any sequence runs or waits."""
        while self.more is not None and len(self.waiting) + len(self.active) < self.slots:
            requests = self.more()
            self.waiting.extend(requests)
            self.more = self.more if requests else None
        return bool(self.waiting or self.active)

    def worth_a_prefill(self, ended: int = 0) -> bool:
        """Return whether enough slots are free for a prefill. `ended` sequences that are not retired yet count as free."""
        free = self.slots - len(self.active) + ended
        enough = self.refill if self.more is not None else min(self.refill, len(self.waiting))
        return self.has_more and (not self.active or free >= enough)

    @property
    def has_more(self) -> bool:
        """True if a sequence waits or `more` may still return requests."""
        return bool(self.waiting) or self.more is not None

    def admit(self, prefill_tokens: int) -> list[list[Request]]:
        """Return the next requests that fit the free slots and whose prompt tokens fit one prefill. There is one list per
        group."""
        groups: list[list[Request]] = []
        free, tokens = self.slots - len(self.active), 0
        while self.waiting and free:
            request = self.waiting[0]
            if not groups or groups[-1][0].group != request.group:
                tokens += len(request.prompt)
                if groups and tokens > prefill_tokens:
                    break
                groups.append([])
            groups[-1].append(self.waiting.popleft())
            free -= 1
        return groups

    def remaining(self) -> int:
        """Return the number of steps until the last running sequence reaches its maximum length."""
        return max((sequence.remaining for sequence in self.active if sequence.finish is None), default=0)

    def retire(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Remove finished sequences. Return them, and the moves (from slot, to slot) that close the gaps."""
        finished = [sequence for sequence in self.active if sequence.finish is not None]
        moves = []
        slot = 0
        while slot < len(self.active):
            if self.active[slot].finish is None:
                slot += 1
                continue
            last = self.active.pop()
            if slot < len(self.active):
                self.active[slot] = last
                if last.finish is None:
                    moves.append((len(self.active), slot))
        return finished, moves
