"""Call a reward function in worker processes: one sample per call, each with a time limit.

If the function hangs, raises or crashes, its sample gets no verdict and the failure is counted. The process is killed and
replaced, and the other samples continue. Grading takes at most samples / workers x (timeout_s + start time of a process). An
async function takes up to twice as long: if its process is killed while it grades several samples, each of them is graded
again, alone.

Each worker is a fresh interpreter. A forked process would inherit CUDA, and multiprocessing's spawn would import the trainer's
main module and torch.

With `workers=0` the function is called in the trainer's process, once with all samples and without a time limit. This mode is
for reward models that need the GPU and a batch. A function that is a Python object and not a name runs in threads, see
`threads.py`.
"""

import math
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RewardConfig as Settings
from ..config import Timeout, Truncated
from ..errors import UserError
from .batch import Graded, SampleBatch, packed_requests
from .find import inside_a_reward, refuse_inside_a_reward
from .log import trim
from .process import START, Worker
from .threads import InThreads
from .weighted_sum import Reward, part_names
from .worker import START_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..rollout.rollout import Rollout

PROMPT_END = 8
"""Number of final prompt tokens that are searched for an opening `<think>` tag."""
UNWATCHED_S = 1.0
"""If the pool has not read from its workers for this many seconds, the exit of a worker may have been a crash or a timeout."""
POLL_S = 1.0
"""Seconds between checks of the log size during grading."""

Messages = list[dict[str, str]]


def rollout_columns(rollouts: Sequence["Rollout"], tokenizer: "PreTrainedTokenizerBase") -> dict[str, list[Any]]:
    """Return the columns for rewards that describe each rollout: how it ended, its token ids, and whether its prompt opened a
    `<think>` block."""
    ends = tokenizer.batch_decode([each.prompt[-PROMPT_END:] for each in rollouts], skip_special_tokens=False)
    return {
        "finish": [each.finish for each in rollouts],
        "completion_ids": [each.response for each in rollouts],
        "in_thought": [end.rstrip().endswith("<think>") for end in ends],
    }


class RewardPool:
    """Pool of reward workers: `with RewardPool("my_rewards:graded") as pool: pool.grade(…)`. Not safe for concurrent calls."""

    def __init__(
        self,
        function: str,
        workers: int = 2,
        timeout_s: float = 10.0,
        *,
        log: Path | None = None,
        truncated: Truncated = "grade",
        timeout: Timeout = "none",
        call: Callable[..., Any] | None = None,
    ):
        """Start the workers and wait until each has imported the function. Their output is written to `log`, or discarded if
        None. With `call`, threads call this object, and `function` is its name."""
        refuse_inside_a_reward()
        self.function, self.timeout_s, self.log = function, timeout_s, log
        self.truncated, self.timeout = truncated, timeout
        self._parts = part_names(function)  # reject a malformed sum before starting workers
        self._size, self._strays = 0 if call else workers, 0
        self._watched_at, self._unwatched_s = time.monotonic(), 0.0
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._in_process: InThreads | None = None
        if call is not None or not workers:
            self._in_process = InThreads(Reward(call) if call else _imported_here(function), workers, timeout_s, log)
        failure = self._fill()
        while not failure and not all(worker.ready for worker in self._workers):
            for worker in self._wait(math.inf):
                failure = failure or self._handle(worker, SampleBatch())
        if failure:
            self.close()
            raise UserError(failure)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._in_process is not None:
            self._in_process.close()
        self._size, self._in_process = 0, None
        for worker in self._workers:
            worker.disconnect()
        for worker in list(self._workers):
            self._discard(worker)
        self._selector.close()

    def grade(
        self, prompts: Sequence[str | Messages], completions: Sequence[str | Messages], columns: dict[str, list[Any]]
    ) -> Graded:
        """Grade completions and return their verdicts.

        Completions may be strings. If a prompt is a list of messages, its completion is also passed to the function as
        messages. The optional column `finish` states which completions were truncated.
        """
        grading = self.start()
        grading.add(prompts, completions, columns)
        return grading.finish()

    @property
    def has_workers(self) -> bool:
        """True if worker processes grade, so that grading can overlap with other work."""
        return not self._in_process

    def start(self) -> "Grading":
        """Start to grade completions that arrive one after another. Finish or cancel it before the next call."""
        assert self._size or self._in_process, "the pool is closed"
        trim(self.log)
        return Grading(self)

    def _graded(self, outcomes: list[dict[str, Any]], cut: list[bool]) -> Graded:
        instead = {"value": 0.0 if self.truncated == "zero" else None}
        sent = [outcome for outcome, each in zip(outcomes, cut, strict=True) if not each]
        outcomes = [instead if each else outcome for outcome, each in zip(outcomes, cut, strict=True)]
        late = 0.0 if self.timeout == "zero" else None
        errors = [outcome["error"] for outcome in sent if "error" in outcome]
        strays, self._strays = self._strays, 0
        return Graded(
            values=[late if "late" in outcome else outcome.get("value") for outcome in outcomes],
            no_verdict=sum("value" in outcome and outcome["value"] is None for outcome in sent),
            timeouts=sum("late" in outcome for outcome in sent),
            errors=len(errors),
            first_error=errors[0] if errors else None,
            parts=by_name(self._parts, [outcome.get("parts") for outcome in outcomes]),
            truncated=sum(cut),
            strays=strays,
        )

    def _poll(self, batch: SampleBatch, failure: str | None, wait_s: float) -> str | None:
        """Read messages of the workers, waiting at most `wait_s`, and assign samples. If a worker could not start, return the
        reason and start no more workers; else return None."""
        self._unwatched_s = time.monotonic() - self._watched_at
        for worker in self._wait(wait_s):
            failure = self._handle(worker, batch) or failure
        self._watched_at = time.monotonic()
        failure = failure or self._fill()
        self._assign(batch)
        if not self._workers:
            batch.fail_rest(failure)
        return failure

    def _is_busy(self, batch: SampleBatch) -> bool:
        return batch.unassigned or any(worker.ready and worker.in_flight for worker in self._workers)

    def _end_batch(self) -> None:
        """Kill the workers that still grade. After an interrupt, no worker may continue a batch."""
        for worker in [worker for worker in self._workers if worker.ready and worker.in_flight]:
            self._discard(worker)
        self._strays += sum(worker.strays for worker in self._workers)
        for worker in self._workers:
            worker.strays = 0

    def _fill(self) -> str | None:
        """Start missing workers. Return the reason if a worker cannot be started, else None."""
        while len(self._workers) < self._size:
            try:
                worker = Worker(self.function, self.timeout_s, self.log)
            except OSError as error:
                return f"A reward process could not be started ({error}): close other programs or lower reward.workers."
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        return None

    def _assign(self, batch: SampleBatch) -> None:
        """Assign each waiting sample to the worker with the fewest samples in flight."""
        for worker in self._workers:
            if batch.alone and worker.idle:
                sample = batch.alone.popleft()
                worker.ask(sample, batch.requests[sample], alone=True)
        while batch.waiting and (free := [worker for worker in self._workers if worker.has_room]):
            sample = batch.waiting.popleft()
            min(free, key=lambda worker: len(worker.in_flight)).ask(sample, batch.requests[sample])

    def _handle(self, worker: Worker, batch: SampleBatch) -> str | None:
        """Handle a worker's messages, exit or timeout. Return the reason if the worker could not start, else None."""
        for sample, message in worker.read():
            if "refused" in message:
                self._discard(worker)
                return str(message["refused"])
            if sample == START:
                worker.at_once = message["ready"]
            elif "late" in message:
                worker.retiring = True
                batch.record([sample], {"late": True}, is_certain=message["alone"] or not message["blocked"])
            elif "started" not in message:
                batch.record([sample], message)
        if worker.ended or time.monotonic() >= worker.overdue_at:
            late, lost, ready = worker.late, list(worker.in_flight.values()), worker.ready
            ended = self._discard(worker)
            if not ready:
                return self._no_start(late, ended)
            outcome = {"late": True} if late else {"error": f"the reward's process exited ({ended})"}
            # after a gap without reads, a crash and a timeout look the same: grade the sample again, alone
            batch.record(lost, outcome, is_certain=len(lost) < 2 and self._unwatched_s < UNWATCHED_S)
        elif worker.retiring and not worker.in_flight:
            self._discard(worker)
        return None

    def _no_start(self, late: bool, ended: str) -> str:
        if late:
            return (
                f"reward.function = {self.function} takes more than {START_S:.0f} s to import: move slow code into the "
                "function."
            )
        return f"reward.function = {self.function} exits its process ({ended}) on import: fix its module."

    def _wait(self, timeout_s: float) -> list[Worker]:
        """Return the workers that have sent a message, have exited or are overdue."""
        first = min((worker.overdue_at for worker in self._workers), default=0.0)
        readable = [key.data for key, _ in self._selector.select(max(0.0, min(timeout_s, first - time.monotonic())))]
        now = time.monotonic()
        return readable + [worker for worker in self._workers if worker.overdue_at <= now and worker not in readable]

    def _discard(self, worker: Worker) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        self._strays += worker.strays
        return worker.kill()


class Grading:
    """One grading by a pool, to which samples are added while others are graded. Verdicts are in the order of `add`."""

    def __init__(self, pool: RewardPool):
        self._pool, self._batch = pool, SampleBatch()
        self._truncated: list[bool] = []
        self._failure = None if pool._in_process else pool._fill()
        pool._watched_at = time.monotonic()

    def add(
        self, prompts: Sequence[str | Messages], completions: Sequence[str | Messages], columns: dict[str, list[Any]]
    ) -> None:
        """Add completions; see `RewardPool.grade`."""
        packed = packed_requests(prompts, completions, columns)
        finish = columns.get("finish", ["stop"] * len(packed))
        truncated = [self._pool.truncated != "grade" and each != "stop" for each in finish]
        self._truncated += truncated
        self._batch.add(packed, truncated)

    def advance(self) -> None:
        """Read the verdicts that have arrived and hand more samples to the workers, without waiting."""
        if not self._pool._in_process:
            self._failure = self._pool._poll(self._batch, self._failure, 0.0)

    @property
    def known(self) -> int:
        """Number of samples whose outcome has arrived."""
        return sum(map(bool, self._batch.outcomes))

    def finish(self) -> Graded:
        """Wait for the remaining verdicts and return all of them."""
        pool, batch = self._pool, self._batch
        if pool._in_process:
            graded = iter(pool._in_process.grade([batch.requests[sample] for sample in batch.waiting]))
            return pool._graded([{} if cut else next(graded) for cut in self._truncated], self._truncated)
        try:
            while pool._is_busy(batch):
                idle = batch.unassigned and any(worker.idle for worker in pool._workers)
                self._failure = pool._poll(batch, self._failure, 0.0 if idle else POLL_S)
                trim(pool.log)
        finally:
            pool._end_batch()
        return pool._graded(batch.outcomes, self._truncated)

    def cancel(self) -> None:
        """Stop grading and discard all verdicts."""
        if not self._pool._in_process:
            self._pool._end_batch()


def pool_for(
    settings: Settings,
    function: str,
    *,
    log: Path | None = None,
    workers: int | None = None,
    call: Callable[..., Any] | None = None,
) -> RewardPool:
    """Return a pool for this function with the configured settings. `workers` overrides the configured number; `call` is the
    function itself, if it is a Python object."""
    return RewardPool(
        function,
        settings.workers if workers is None else workers,
        settings.timeout_s,
        log=log,
        truncated=settings.truncated,
        timeout=settings.timeout,
        call=call,
    )


def _imported_here(function: str) -> Reward:
    """Import the reward in the trainer's process."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with inside_a_reward():
        return Reward(function)


def by_name(names: list[str], parts: Sequence[list[float | None] | None]) -> dict[str, list[float | None]]:
    """Group the values of a weighted sum by function name. Return an empty dict for a single function."""
    if len(names) < 2:
        return {}
    return {name: [each[place] if each else None for each in parts] for place, name in enumerate(names)}
