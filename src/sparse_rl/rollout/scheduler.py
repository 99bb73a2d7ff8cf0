"""Assign slots: requests wait in order, active sequences occupy the first slots, and a finished sequence frees its slot.

The scheduler runs on the host and uses plain integers. The active slots are always 0 to n - 1, so a step processes the front
of the cache and no idle slots. With a prompt store, a group also needs pages, and waits until enough are free.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from ..kv.prompt_store import PagePool
from ..kv.trace import TraceRecorder
from ..sizes import pages_of
from .repetition import RepetitionGuard
from .request import Request
from .rollout import Finish


@dataclass
class Sequence:
    """A rollout in progress."""

    request: Request
    held: int
    """Tokens in the slot, per layer and head."""
    trace: TraceRecorder | None
    """Recorder of the evictions, if the request asks for them."""
    stored: int = 0
    """Tokens of the prompt in the prompt store; 0 if the slot holds the prompt."""
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
    def cached(self) -> int:
        """Tokens that the sequence attends to, per layer and head."""
        return self.stored + self.held

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
    def __init__(
        self,
        requests: list[Request],
        slots: int,
        refill: int = 1,
        more: Callable[[], list[Request]] | None = None,
        pages: PagePool | None = None,
    ):
        """Queue the requests.

        While sequences run, new ones enter only if `refill` slots are free, or enough slots for all that wait. If there is
        room, `more` is called for another group until it returns an empty list. `pages` are those of the prompt store.
        """
        self.slots, self.refill, self.more, self.pages = slots, refill, more, pages
        self.waiting = deque(requests)
        self.active: list[Sequence] = []

    def has_work(self) -> bool:
        """Call `more` for requests if there is room. Return whether any sequence runs or waits."""
        while self.more is not None and len(self.waiting) + len(self.active) < self.slots:
            requests = self.more()
            self.waiting.extend(requests)
            self.more = self.more if requests else None
        return bool(self.waiting or self.active)

    def worth_a_prefill(self) -> bool:
        """Return whether enough slots and pages are free for a prefill. Sequences that have ended but are not retired yet
        count as free."""
        ended = Counter(sequence.request.group for sequence in self.active if sequence.finish is not None)
        free = self.slots - len(self.active) + ended.total()
        enough = self.refill if self.more is not None else min(self.refill, len(self.waiting))
        return self.has_more and (not self.active or free >= enough) and self._has_pages(ended)

    def _has_pages(self, ended: Counter[int]) -> bool:
        """Return whether the next group finds enough pages, if the groups all of whose samples `ended` return theirs."""
        if self.pages is None or not self.waiting or self.waiting[0].group in self.pages.of_group:
            return True
        returned = sum(
            len(self.pages.of_group[group]) for group, count in ended.items() if count == self.pages.samples_left[group]
        )
        return pages_of(len(self.waiting[0].prompt)) <= len(self.pages.free) + returned

    @property
    def has_more(self) -> bool:
        """True if a sequence waits or `more` may still return requests."""
        return bool(self.waiting) or self.more is not None

    def admit(self, prefill_tokens: int) -> list[list[Request]]:
        """Return the next requests that fit the free slots and pages, and whose prompt tokens fit one prefill. There is one
        list per group."""
        groups: list[list[Request]] = []
        free, tokens = self.slots - len(self.active), 0
        while self.waiting and free:
            request = self.waiting[0]
            if not groups or groups[-1][0].group != request.group:
                tokens += len(request.prompt)
                if (groups and tokens > prefill_tokens) or not self._take_pages(request):
                    break
                groups.append([])
            groups[-1].append(self.waiting.popleft())
            free -= 1
        return groups

    def _take_pages(self, request: Request) -> bool:
        """Take pages for the request's group, unless it has them. Return False if too few are free."""
        if self.pages is None or request.group in self.pages.of_group:
            return True
        samples = sum(1 for _ in takewhile(lambda each: each.group == request.group, self.waiting))
        return self.pages.take(request.group, len(request.prompt), samples)

    def remaining(self) -> int:
        """Return the number of steps until the last running sequence reaches its maximum length."""
        return max((sequence.remaining for sequence in self.active if sequence.finish is None), default=0)

    def retire(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Remove finished sequences. Return them, and the moves (from slot, to slot) that close the gaps."""
        finished = [sequence for sequence in self.active if sequence.finish is not None]
        if self.pages is not None:
            for sequence in finished:
                self.pages.end_sample(sequence.request.group)
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
