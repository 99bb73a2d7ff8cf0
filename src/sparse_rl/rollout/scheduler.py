"""Who gets a slot: requests wait in order, active sequences fill the first slots, a finished one makes room.

All of it is bookkeeping of the host in plain integers. The active slots are always 0 to n - 1, so that a step works on
the front of the cache and never on idle slots.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..kv.trace import TraceRecorder
from .repetition import RepetitionGuard
from .rollout import Finish


@dataclass(frozen=True)
class Request:
    index: int
    """Place in the result."""
    group: int
    """Index of the prompt: requests of one group are prefilled together."""
    prompt: list[int]
    seed: int
    max_tokens: int


@dataclass
class Sequence:
    """A rollout in the making."""

    request: Request
    held: int
    """Tokens in the cache, per layer and head."""
    trace: TraceRecorder
    guard: RepetitionGuard | None = None
    entered: int = 0
    """Response tokens whose keys have entered the cache, those of steps after the end included."""
    tokens: int = 0
    """Of the response so far."""
    last_token: int = -1
    pieces: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Tokens and log-probs of the response, a chunk at a time: views of what came from the device."""
    finish: Finish | None = None
    kv_peak: int = 0

    @property
    def position(self) -> int:
        """Of the next token to be fed."""
        return len(self.request.prompt) + self.entered

    @property
    def last_position(self) -> int:
        """The position of the last token that may be fed: what the model was made for is not passed."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - self.tokens

    def take(self, tokens: np.ndarray, logprobs: np.ndarray, stop_at: int) -> int:
        """Append sampled tokens up to the end of the rollout; how many were taken. `stop_at` is the first place of a stop
        token among them, their number if there is none."""
        if stop_at == len(tokens) < self.remaining and self.guard is None:  # most chunks end nothing: the short way
            self.pieces.append((tokens, logprobs))
            self.tokens += stop_at
            self.last_token = int(tokens[-1])
            return stop_at
        taken = min(stop_at + 1, len(tokens), self.remaining)
        if self.guard is not None:
            for place, token in enumerate(tokens[:taken].tolist()):
                if self.guard.sees_repetition(token) and place != stop_at:
                    taken, self.finish = place + 1, "repetition"
                    break
        self.pieces.append((tokens[:taken], logprobs[:taken]))
        self.tokens += taken
        self.last_token = int(tokens[taken - 1])
        if stop_at < taken:
            self.finish = "stop"
        elif self.finish is None and not self.remaining:
            self.finish = "length"
        return taken

    def response(self) -> tuple[list[int], np.ndarray]:
        """Its tokens and their log-probs."""
        tokens, logprobs = zip(*self.pieces, strict=True)
        return np.concatenate(tokens).tolist(), np.concatenate(logprobs)


class Scheduler:
    def __init__(self, requests: list[Request], slots: int, refill: int = 1, more: Callable[[], list[Request]] | None = None):
        """While any sequence runs, new ones enter only into `refill` free slots or more (or all that wait). When there is room,
        `more` is asked for another group, until it has none."""
        self.slots, self.refill, self.more = slots, refill, more
        self.waiting = deque(requests)
        self.active: list[Sequence] = []

    def has_work(self) -> bool:
        """Whether a sequence runs or waits, after asking for more."""
        while self.more is not None and len(self.waiting) + len(self.active) < self.slots:
            requests = self.more()
            self.waiting.extend(requests)
            self.more = self.more if requests else None
        return bool(self.waiting or self.active)

    def worth_a_prefill(self, ended: int = 0) -> bool:
        """Whether enough slots are free, those of `ended` sequences that have not been taken out included."""
        free = self.slots - len(self.active) + ended
        enough = self.refill if self.more is not None else min(self.refill, len(self.waiting))
        return self.has_more and (not self.active or free >= enough)

    @property
    def has_more(self) -> bool:
        """Whether a sequence waits, or may be asked for."""
        return bool(self.waiting) or self.more is not None

    def admit(self, prefill_tokens: int) -> list[list[Request]]:
        """The next requests that fit the free slots and, by their prompts' tokens, one prefill; a list for each group."""
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
        """Steps until the last running sequence reaches its maximum length."""
        return max((sequence.remaining for sequence in self.active if sequence.finish is None), default=0)

    def retire(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Take the finished out; the moves (from slot, to slot) that close the gaps they leave."""
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
