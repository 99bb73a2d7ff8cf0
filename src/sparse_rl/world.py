"""Ranks of a run and their communication. A single process has a world of size 1 and does not communicate.

Every rank holds all rollouts of a step and computes statistics and rejections from all of them. Only model passes are divided:
sampling by rollout group, learning by tokens. Several ranks therefore compute the same result as one, up to floating-point
summation order.
"""

import heapq
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import RankLost, UserError, first_line

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    control: Any = None
    """Process group on the CPU, for Python objects."""
    store: Any = None
    """Distributed store with counters shared by all ranks."""
    timeout: timedelta = timedelta(minutes=30)
    queues: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes files and prints: rank 0."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order.

        Raise RankLost, which names the rank, if a rank does not respond.
        """
        if self.size == 1:
            return [value]
        self.barrier()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all ranks. Raise RankLost if a rank does not arrive before the timeout."""
        if self.size == 1:
            return
        failed: list[RuntimeError] = []

        def monitored() -> None:
            try:
                dist.monitored_barrier(self.control, self.timeout, wait_all_ranks=True)
            except RuntimeError as error:
                failed.append(error)

        waiting = threading.Thread(target=monitored, name="barrier", daemon=True)
        waiting.start()
        while waiting.is_alive():
            waiting.join(0.2)  # this thread can be interrupted while it joins, but not inside gloo
        if failed:
            raise RankLost(
                f"{lost_rank_message(failed[0])} (ranks.timeout_s = {self.timeout.total_seconds():g}): see that rank's output."
            ) from failed[0]

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def sum_gradients(self, params: Sequence[Tensor]) -> None:
        """Sum gradients over all ranks in place, for parameters that are replicated on every rank. A missing gradient counts
        as zero."""
        if self.size == 1:
            return
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        flat = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
        dist.all_reduce(flat, group=self.control if flat.device.type == "cpu" else None)
        for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.grad = part.view_as(param)

    def passes(self, lengths: Sequence[int], tokens: int) -> list[list[int]]:
        """Return the row indices of each forward pass on this rank, with at most `tokens` tokens per pass.

        All ranks get the same number of passes. A pass may be empty.
        """
        return balanced_passes(lengths, self.size, tokens)[self.rank]

    def work_queue(self, costs: Sequence[float], at_once: int) -> Callable[[], int | None]:
        """Return a function that returns the next item for this rank on each call, and None when no items are left.

        All ranks must create their work queues in the same order. The costliest `at_once` items per rank are assigned evenly
        in advance. Each remaining item goes to the first rank that asks for one.
        """
        order = sorted(range(len(costs)), key=lambda item: -costs[item])
        assigned = order[: at_once * self.size]
        mine = [item for turn, item in enumerate(assigned) if _snake(turn, self.size) == self.rank]
        rest = order[len(assigned) :]
        name = f"queue-{next(self.queues)}"

        def take() -> int | None:
            if mine:
                return mine.pop(0)
            place = self.store.add(name, 1) - 1 if rest else 0
            return rest[place] if place < len(rest) else None

        return take


ALONE = World()

LOST = re.compile("closed by peer|reset by peer|[Tt]imed out|Broken pipe")
"""Pattern of gloo messages that report a lost peer."""


def agreed(world: World, work: Callable[[], T]) -> T:
    """Run `work` on this rank and return its result. If `work` raises UserError on any rank, raise it on all ranks."""
    found, failed = None, None
    try:
        found = work()
    except UserError as error:
        failed = error
    for each in world.gather(failed):
        if each is not None:
            raise each
    return found  # type: ignore[return-value]


def balanced_passes(lengths: Sequence[int], ranks: int, tokens: int) -> list[list[list[int]]]:
    """Return the row indices by rank and pass.

    Rows are assigned longest first to balance tokens, in as few passes as `tokens` allows. A row longer than `tokens` gets its
    own pass.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    passes = max(1, math.ceil(sum(min(length, tokens) for length in lengths) / (tokens * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(passes * ranks)]
        emptiest = [(0, number) for number in range(len(bins))]
        for row in order:
            held, number = heapq.heappop(emptiest)
            bins[number].append(row)
            heapq.heappush(emptiest, (held + lengths[row], number))
        if all(len(bin) == 1 or held <= tokens for held, bin in ((held, bins[number]) for held, number in emptiest)):
            return [[sorted(bin) for bin in bins[rank::ranks]] for rank in range(ranks)]
        passes += 1


def lost_rank_message(error: RuntimeError) -> str:
    """Return a message that names the rank that did not respond, extracted from gloo's error."""
    found = re.search(r"Ranks? ([\d, ]+) failed|from rank (\d+)", str(error))
    if not found:
        return f"A rank did not respond ({first_line(error)})"
    return (
        f"Rank {found[1]} did not respond" if found[1] else f"Rank {found[2]} did not respond, or is waiting for another rank"
    )


def _snake(turn: int, ranks: int) -> int:
    """Return the rank for a turn, in the order 0 1 2 2 1 0 0 1 2.

    The rank that gets the costliest item of one round gets the cheapest item of the next.
    """
    round, place = divmod(turn, ranks)
    return ranks - 1 - place if round % 2 else place
