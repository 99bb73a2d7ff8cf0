"""Call a reward in the trainer's process: a Python object, such as a closure, in threads, or with `workers=0` any reward.

Another process cannot run a closure, so threads do: one sample per call, each with a time limit. A thread cannot be killed. A
call beyond its time limit is abandoned: its sample counts as a timeout, a new thread takes over, and the old one runs until the
function returns. Code that holds the interpreter lock, such as a regular expression that never ends, stops the trainer as well. A
reward passed by name (`my_rewards:graded`) runs in worker processes, which can be killed.
"""

import asyncio
import os
import pickle
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from .find import one_line
from .weighted_sum import Reward, awaited, fault_of
from .worker import AT_ONCE

GRACE_S = 1.0
"""Seconds after its time limit at which an asynchronous call is cancelled. By then it counts as a timeout."""


class InThreads:
    """Reward that runs in `workers` threads; with `workers=0`, in the caller's thread, once per batch and without a limit."""

    def __init__(self, reward: Reward, workers: int, timeout_s: float, log: Path | None):
        self.reward, self.timeout_s, self.log = reward, timeout_s, log
        self.threads = workers * (AT_ONCE if reward.is_async else 1)
        self._loop = _running_loop()
        """Event loop that runs the coroutines of the reward, in one thread for all calls."""

    def grade(self, packed: list[bytes]) -> list[dict[str, Any]]:
        """Return the outcome of each sample: a value, an error or a timeout."""
        if not packed:
            return []
        return _Calls(self, packed).outcomes() if self.threads else self.call(packed)

    def call(self, packed: list[bytes]) -> list[dict[str, Any]]:
        """Call the reward once with these samples and return their outcomes."""
        prompts, completions, rows = zip(*map(pickle.loads, packed), strict=True)
        arguments = list(prompts), list(completions), {name: [row[name] for row in rows] for name in rows[0]}
        try:
            verdicts = self.reward(*arguments, wait=self._wait)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # KeyboardInterrupt is left to the trainer
            with open(self.log or os.devnull, "a") as output:
                traceback.print_exc(file=output)
            return [{"error": one_line(error)}] * len(packed)
        faults = [fault_of(verdict) for verdict in verdicts]
        return [
            {"error": fault} if fault else {"value": verdict.total, "parts": verdict.parts}
            for verdict, fault in zip(verdicts, faults, strict=True)
        ]

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, result: Any) -> Any:
        """Return the result, awaited in the event loop if it is awaitable. Cancel it after the time limit."""
        if not hasattr(result, "__await__"):
            return result
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(awaited(result), self._loop)
        try:
            return future.result(self.timeout_s + GRACE_S if self.threads else None)
        except TimeoutError:
            future.cancel()
            raise


class _Calls:
    """The calls of one batch. Threads take samples; the caller's thread waits and replaces threads that exceed the time limit."""

    def __init__(self, pool: InThreads, packed: list[bytes]):
        self.pool, self.packed = pool, packed
        self.waiting = deque(range(len(packed)))
        self.late_at: dict[int, float] = {}
        """Time limit of each sample that a thread grades."""
        self.done: dict[int, dict[str, Any]] = {}
        self.changed = threading.Condition()

    def outcomes(self) -> list[dict[str, Any]]:
        for _ in range(min(self.pool.threads, len(self.packed))):
            self._start()
        with self.changed:
            try:
                while len(self.done) < len(self.packed):
                    self.changed.wait(max(0.0, min(self.late_at.values(), default=1.0 + time.monotonic()) - time.monotonic()))
                    self._abandon_late()
            finally:
                self.waiting.clear()  # after an interrupt, no thread may continue the batch
        return [self.done[sample] for sample in range(len(self.packed))]

    def _abandon_late(self) -> None:
        now = time.monotonic()
        for sample in [sample for sample, late_at in self.late_at.items() if late_at <= now]:
            del self.late_at[sample]
            self.done[sample] = {"late": True}
            self._start()

    def _start(self) -> None:
        threading.Thread(target=self._work, name="reward", daemon=True).start()  # daemon: an abandoned call may never end

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self.waiting:
                    return
                sample = self.waiting.popleft()
                self.late_at[sample] = time.monotonic() + self.pool.timeout_s
            (outcome,) = self.pool.call([self.packed[sample]])
            with self.changed:
                if sample in self.done:  # abandoned, and another thread has taken over
                    return
                del self.late_at[sample]
                self.done[sample] = outcome
                self.changed.notify()


def _running_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop in a new thread, because a notebook already runs one in the main thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward loop", daemon=True).start()
    return loop
