"""Assign slots: requests wait in order, active sequences occupy the first slots, and a finished sequence frees its slot.

The scheduler runs on the host and uses plain integers. The active slots are always 0 to n - 1, so a step processes the front
of the cache and no idle slots. With a prompt store, a group also needs pages, and waits until enough are free. In a dense
cache, sequences take pages as they grow. If pages run out, the youngest sequences are paused: they return their pages, wait at
the head of the queue, and keep their tokens, whose keys are recomputed later.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from ..kv.prompt_store import PagePool
from ..kv.trace import TraceRecorder
from ..models.routing import ExpertChoices
from ..sizes import PAGE_TOKENS, pages_beyond_slot, pages_of
from .repetition import RepetitionGuard
from .request import Request
from .rollout import Finish

HEADROOM_PAGES = 2
"""Pages that stay free for each running sequence when another one enters a dense cache. Fewer would pause it again soon."""


@dataclass
class Sequence:
    """A rollout in progress."""

    request: Request
    held: int
    """Tokens in the slot, per layer and head."""
    trace: TraceRecorder | None
    """Recorder of the evictions, if the request asks for them."""
    stored: int = 0
    """Tokens in the prompt store: the prompt, or in a dense cache all tokens except the newest."""
    pages: list[int] = field(default_factory=list)
    """Pages of a dense sequence, without the pages that it shares with the other samples of its prompt."""
    number: int = 0
    """Order in which sequences entered. The largest number is the youngest sequence."""
    repetition: RepetitionGuard | None = None
    entered: int = 0
    """Response tokens whose keys have entered the cache, including steps after the end."""
    tokens: int = 0
    """Number of response tokens so far."""
    last_token: int = -1
    pieces: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Tokens and log-probs of the response, one pair per chunk. They are views of the arrays copied from the device."""
    finish: Finish | None = None
    kv_peak: int = 0
    prompt_choices_TRK: Tensor | None = None
    """Experts chosen for the prompt's tokens, if they are recorded."""
    choices: list[np.ndarray] = field(default_factory=list)
    """Experts chosen for the response tokens that were fed, [tokens, routers, experts per token] per chunk."""

    @property
    def prompt_pages(self) -> int:
        """Full pages of the prompt, which all samples of a dense group read."""
        return len(self.request.prompt) // PAGE_TOKENS

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

    @property
    def pages_to_come(self) -> int:
        """Pages that a dense sequence still fills if it reaches its full length."""
        return pages_beyond_slot(self.held, self.remaining + 1)

    @property
    def fills_a_page(self) -> bool:
        """True if the oldest tokens of a dense slot fill a page and cannot stay to the end."""
        return self.held >= PAGE_TOKENS and self.pages_to_come > 0

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, stop_at: int, repeats_at: int) -> int:
        """Append sampled tokens up to the end of the rollout and return their number. `stop_at` and `repeats_at` are the indices
        of the first stop token and the first repetition, or the number of tokens if there is none."""
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

    def routing(self) -> ExpertChoices | None:
        """Return the experts chosen for the tokens of prompt and response, if they are recorded."""
        if self.prompt_choices_TRK is None:
            return None
        empty = self.prompt_choices_TRK[:0].numpy()  # a response of one token has no decode step
        return ExpertChoices(self.prompt_choices_TRK, torch.from_numpy(np.concatenate([empty, *self.choices])))

    def response(self) -> tuple[list[int], np.ndarray]:
        """Return the tokens and their log-probs."""
        tokens, logprobs = zip(*self.pieces, strict=True)
        return np.concatenate(tokens).tolist(), np.concatenate(logprobs)


def pages_to_fill(request: Request) -> int:
    """Return the pages that the response to a request fills in a dense cache if it reaches its full length."""
    return pages_beyond_slot(len(request.prompt) % PAGE_TOKENS, request.max_tokens)


def dense_tokens_held(running: list[Sequence]) -> int:
    """Return the tokens that a dense cache in pages would hold: the responses so far, and the prompt of each group once."""
    prompts = {sequence.request.group: len(sequence.request.prompt) for sequence in running}
    return sum(prompts.values()) + sum(sequence.entered for sequence in running)


class Scheduler:
    """Queue of requests, and the sequences that occupy slots and pages."""

    def __init__(
        self,
        requests: list[Request],
        slots: int,
        refill: int = 1,
        more: Callable[[], list[Request]] | None = None,
        pages: PagePool | None = None,
    ):
        """Queue the requests.

        While sequences run, new ones enter only if `refill` slots are free, or enough slots for all waiting requests. If slots
        are free, `more` is called for another group, until it returns an empty list. `pages` is the pool of the prompt store.
        """
        self.slots, self.refill, self.more, self.pages = slots, refill, more, pages
        self.waiting = deque(requests)
        self.total = len(requests)
        """Number of requests so far, including those from `more`."""
        self.active: list[Sequence] = []
        self.paused: dict[int, Sequence] = {}
        """Paused sequences, by the index of their request."""

    def has_work(self) -> bool:
        """Call `more` for requests if there is room. Return whether any sequence runs or waits."""
        while self.more is not None and len(self.waiting) + len(self.active) < self.slots:
            requests = self.more()
            self.waiting.extend(requests)
            self.total += len(requests)
            self.more = self.more if requests else None
        return bool(self.waiting or self.active)

    def should_prefill(self) -> bool:
        """Return whether enough slots and pages are free for a prefill. Sequences that have ended but are not retired yet
        count as free."""
        ended = Counter(sequence.request.group for sequence in self.active if sequence.finish is not None)
        free = self.slots - len(self.active) + ended.total()
        enough = self.refill if self.more is not None else min(self.refill, len(self.waiting))
        return self.has_more and (not self.active or free >= enough) and self._has_pages(ended)

    def _has_pages(self, ended: Counter[int]) -> bool:
        """Return whether enough pages are free for the next request. Pages of finished sequences, and of groups whose samples
        have all `ended`, count as free."""
        if self.pages is None or not self.waiting:
            return True
        returned = sum(
            len(self.pages.of_group[group]) for group, count in ended.items() if count == self.pages.samples_left[group]
        )
        returned += sum(len(sequence.pages) for sequence in self.active if sequence.finish is not None)
        return self._pages_for(self.waiting[0], []) <= len(self.pages.free) + returned

    def _pages_for(self, request: Request, entering: list[Request]) -> int:
        """Return the number of free pages that a request needs to enter together with the requests in `entering`.

        In a dense cache, this includes the pages of a paused sequence, and headroom for it and all running sequences. The
        partly filled last pages of groups that enter before it become free once they have started.
        """
        assert self.pages is not None
        needed = 0 if request.group in self.pages.of_group else pages_of(len(request.prompt))
        if not self.pages.responses:
            return needed
        needed += pages_of(self._own_tokens(request))
        if self.active or entering:
            running = [sequence.pages_to_come for sequence in self.active if sequence.finish is None]
            to_come = running + [pages_to_fill(each) for each in (*entering, request)]
            before = {each.group: len(each.prompt) for each in entering if each.group != request.group}
            partial = sum(len(self.pages.of_group[group]) - tokens // PAGE_TOKENS for group, tokens in before.items())
            needed += max(0, sum(min(HEADROOM_PAGES, pages) for pages in to_come) - partial)
        return needed

    def _own_tokens(self, request: Request) -> int:
        """Return the tokens of a paused sequence that are not in full pages of its prompt; 0 for a new request."""
        sequence = self.paused.get(request.index)
        return 0 if sequence is None else sequence.position - sequence.prompt_pages * PAGE_TOKENS

    @property
    def has_more(self) -> bool:
        """True if a sequence waits or `more` may still return requests."""
        return bool(self.waiting) or self.more is not None

    def waiting_of(self, group: int) -> list[Request]:
        """Return the requests of this group at the head of the queue."""
        return list(takewhile(lambda request: request.group == group, self.waiting))

    def admit(self, prefill_tokens: int) -> list[list[Request]]:
        """Return the next requests that fit the free slots and pages, and whose prompt tokens fit one prefill. There is one
        list per group."""
        groups: list[list[Request]] = []
        free, tokens = self.slots - len(self.active), 0
        while self.waiting and free:
            request = self.waiting[0]
            is_new = not groups or groups[-1][0].group != request.group
            tokens += len(request.prompt) if is_new else 0
            if (is_new and groups and tokens > prefill_tokens) or not self._take_pages(request, groups):
                break
            if is_new:
                groups.append([])
            groups[-1].append(self.waiting.popleft())
            free -= 1
        return groups

    def _take_pages(self, request: Request, groups: list[list[Request]]) -> bool:
        """Take pages for the request's group, unless it has them, and for a paused sequence. Return False if too few are free."""
        if self.pages is None:
            return True
        if self._pages_for(request, [each for group in groups for each in group]) > len(self.pages.free):
            return False
        if request.group not in self.pages.of_group:
            self.pages.take_group(request.group, len(request.prompt), len(self.waiting_of(request.group)))
        if tokens := self._own_tokens(request):
            self.paused[request.index].pages = self.pages.take_pages(tokens)
        return True

    def return_last_pages(self, groups: list[list[Request]]) -> None:
        """Return the partly filled last prompt page of dense groups that have started, unless a sample still needs it."""
        assert self.pages is not None
        needed = {request.group for request in self.waiting if request.index not in self.paused}
        for request in (group[0] for group in groups if group[0].group not in needed):
            self.pages.keep(request.group, len(request.prompt) // PAGE_TOKENS)

    def make_room(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Pause the youngest sequences of a dense cache until every slot that has filled a page finds a free one.

        Return the paused sequences, and the moves (from slot, to slot) that close the gaps. Groups without a running
        sample return their pages first. The oldest sequence always continues.
        """
        assert self.pages is not None
        running = sorted(self.active, key=lambda sequence: sequence.number)
        paused: list[Sequence] = []
        while sum(sequence.fills_a_page for sequence in running) > len(self.pages.free):
            idle = self.pages.of_group.keys() - {sequence.request.group for sequence in running}
            for group in idle:
                self.pages.release(group)
            if not idle:
                assert len(running) > 1
                paused.append(running.pop())
                self.pages.give_back(paused[-1].pages)
                paused[-1].pages = []
                self.waiting.appendleft(paused[-1].request)
        self.paused |= {sequence.request.index: sequence for sequence in paused}
        return paused, self._remove({id(sequence) for sequence in paused})

    def remaining(self) -> int:
        """Return the number of steps until the last running sequence reaches its maximum length."""
        return max((sequence.remaining for sequence in self.active if sequence.finish is None), default=0)

    def retire(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Remove finished sequences. Return them, and the moves (from slot, to slot) that close the gaps."""
        finished = [sequence for sequence in self.active if sequence.finish is not None]
        if self.pages is not None:
            for sequence in finished:
                self.pages.end_sample(sequence.request.group)
                self.pages.give_back(sequence.pages)
        return finished, self._remove({id(sequence) for sequence in finished})

    def _remove(self, gone: set[int]) -> list[tuple[int, int]]:
        """Remove the sequences with these ids. Return the moves (from slot, to slot) that close the gaps."""
        moves = []
        slot = 0
        while slot < len(self.active):
            if id(self.active[slot]) not in gone:
                slot += 1
                continue
            last = self.active.pop()
            if slot < len(self.active):
                self.active[slot] = last
                if id(last) not in gone:
                    moves.append((len(self.active), slot))
        return moves
