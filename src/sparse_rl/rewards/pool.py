"""Calls a reward function in processes of its own, one sample per call, each with a limit on the clock.

A function that hangs, raises or crashes costs its sample the verdict and is counted; its process is killed and replaced, and
the other samples go on. Grading takes at most samples / workers x (timeout_s + the time a process takes to start).

A process is a fresh interpreter: a fork would inherit CUDA, and multiprocessing's spawn imports the trainer's main module,
and torch with it.

With no workers the function is called here instead, once with all samples and without a limit: for a reward model that
wants the GPU and a batch.
"""

import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from .find import one_line
from .several import part_names, reward_of
from .worker import LENGTH_BYTES, START_S

GRACE_S = 0.5
"""A worker ends itself at its limit and leaves a traceback in the log; one that cannot is killed this much later."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Graded:
    """The verdicts of a batch; a value is None for any of three reasons, which are counted apart."""

    values: list[float | None]
    no_verdict: int
    """The function returned None."""
    timeouts: int
    errors: int
    """It raised, ended its process, or returned anything but one finite number."""
    first_error: str | None
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Of a sum of several functions, what each returned; a sample that got no verdict has none."""


class RewardPool:
    """`with RewardPool("my_rewards:graded") as pool: pool.grade(…)`. For one caller at a time."""

    def __init__(self, function: str, workers: int = 2, timeout_s: float = 10.0, *, log: Path | None = None):
        """Waits until every worker has imported the function. What they print goes to `log`, or nowhere."""
        self.function, self.timeout_s, self.log = function, timeout_s, log
        self._parts = part_names(function)  # a sum that cannot be read is refused before anything starts
        self._size = workers
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._here = None if workers else _Here(function, log)
        failure = self._fill()
        for worker in list(self._workers):
            failure = failure or self._start(worker, worker.read())
        if failure:
            self.close()
            raise UserError(failure)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._size, self._here = 0, None
        for worker in list(self._workers):
            self._discard(worker)
        self._selector.close()

    def grade(
        self, prompts: Sequence[str | Messages], completions: Sequence[str | Messages], columns: dict[str, list[Any]]
    ) -> Graded:
        """Completions may all be texts: where a prompt is messages, the function gets its completion as messages, too."""
        assert self._size or self._here, "the pool is closed"
        if self._here:
            return self._here.grade(prompts, completions, columns)
        waiting = deque(enumerate(requests(prompts, completions, columns)))
        outcomes: list[dict[str, Any]] = [{} for _ in waiting]
        failure = self._fill()  # why a worker could not start: then no further one is tried in this call
        try:
            while waiting or any(worker.sample is not None for worker in self._workers):
                for worker in self._wait(0 if waiting and any(worker.idle for worker in self._workers) else math.inf):
                    sample, late, message = worker.sample, worker.late, worker.read()
                    if not worker.ready:
                        failure = self._start(worker, message) or failure
                    elif message and sample is not None:
                        outcomes[sample] = message
                        worker.rest()
                    else:
                        ended = self._discard(worker)
                        failure = failure or self._fill()
                        if sample is not None:
                            outcomes[sample] = {"late": True} if late else {"error": f"the reward ended its process ({ended})"}
                for worker in self._workers:
                    if worker.idle and waiting:
                        worker.ask(*waiting.popleft(), self.timeout_s)
                if not self._workers:
                    outcomes = [outcome or {"error": failure} for outcome in outcomes]
                    break
        finally:  # when interrupted: an answer to this batch must not be taken for one to the next
            for worker in [worker for worker in self._workers if worker.sample is not None]:
                self._discard(worker)
        errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
        return Graded(
            values=[outcome.get("value") for outcome in outcomes],
            no_verdict=sum("value" in outcome and outcome["value"] is None for outcome in outcomes),
            timeouts=sum("late" in outcome for outcome in outcomes),
            errors=len(errors),
            first_error=errors[0] if errors else None,
            parts=by_name(self._parts, [outcome.get("parts") for outcome in outcomes]),
        )

    def _fill(self) -> str | None:
        """Start the workers that are missing; the reason, if that cannot be done."""
        while len(self._workers) < self._size:
            try:
                worker = _Worker(self.function, self.timeout_s, self.log)
            except OSError as error:
                return (
                    f"A process for the reward could not be started ({error}): close other programs or lower reward.workers."
                )
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        return None

    def _start(self, worker: "_Worker", message: dict[str, Any] | None) -> str | None:
        """Take in a worker's first message; the reason, if it could not import the function."""
        if message and "refused" not in message:
            worker.ready = True
            worker.rest()
            return None
        late, ended = worker.late, self._discard(worker)
        if message:
            return str(message["refused"])
        if late:
            return f"reward.function = {self.function} takes over {START_S:.0f} s to import: move slow work into the function."
        return f"reward.function = {self.function} ends its process ({ended}) when imported: mend its module."

    def _wait(self, timeout_s: float) -> list["_Worker"]:
        """The workers that have said something, have ended or are overdue."""
        first = min((worker.overdue_at for worker in self._workers), default=0.0)
        said = [key.data for key, _ in self._selector.select(max(0.0, min(timeout_s, first - time.monotonic())))]
        now = time.monotonic()
        return said + [worker for worker in self._workers if worker.overdue_at <= now and worker not in said]

    def _discard(self, worker: "_Worker") -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.kill()


class _Here:
    """The reward in this process, called with a whole batch."""

    def __init__(self, function: str, log: Path | None):
        self.log = log
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        self.reward, self.parts = reward_of(function), part_names(function)

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, list[Any]]) -> Graded:
        samples = [pickle.loads(request) for request in requests(prompts, completions, columns)]  # copies, as a worker has
        rows = {name: [row[name] for _, _, row in samples] for name in columns}
        try:
            verdicts = self.reward([each[0] for each in samples], [each[1] for each in samples], **rows) if samples else []
        except Exception as error:
            with open(self.log or os.devnull, "a") as output:
                traceback.print_exc(file=output)
            return Graded([None] * len(samples), 0, 0, len(samples), one_line(error))
        totals = [verdict.total for verdict in verdicts]
        broken = [total for total in totals if total is not None and not math.isfinite(total)]
        values = [None if total is None or not math.isfinite(total) else total for total in totals]
        parts = [None if value is None else verdict.parts for value, verdict in zip(values, verdicts, strict=True)]
        first = f"the reward returned {broken[0]}" if broken else None
        return Graded(values, totals.count(None), 0, len(broken), first, by_name(self.parts, parts))


def by_name(names: list[str], parts: Sequence[list[float | None] | None]) -> dict[str, list[float | None]]:
    """Of one function alone there is nothing to tell apart."""
    if len(names) < 2:
        return {}
    return {name: [each[place] if each else None for each in parts] for place, name in enumerate(names)}


class _Worker:
    """A process, its socket, and what it is at: importing until `ready`, then grading `sample` or idle."""

    def __init__(self, function: str, timeout_s: float, log: Path | None):
        self.socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]}; from {__package__}.worker import main; "
        code += f"main({theirs.fileno()}, {function!r}, {timeout_s!r})"
        with theirs, open(log or os.devnull, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],  # -u: what was printed before a kill is in the log
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # away from the terminal's Ctrl-C, and one group to kill with all its children
            )
        self.replies = self.socket.makefile("rb")
        self.sample: int | None = None
        self.ready = False
        self.late_at = time.monotonic() + START_S

    @property
    def idle(self) -> bool:
        return self.ready and self.sample is None

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.late_at

    @property
    def overdue_at(self) -> float:
        return self.late_at + GRACE_S

    def rest(self) -> None:
        self.sample, self.late_at = None, math.inf

    def ask(self, sample: int, request: bytes, timeout_s: float) -> None:
        self.sample, self.late_at = sample, time.monotonic() + timeout_s
        self.socket.settimeout(timeout_s)
        with suppress(OSError):  # it ended or does not read: the reply that fails to come will tell
            self.socket.sendall(len(request).to_bytes(LENGTH_BYTES, "big") + request)

    def read(self) -> dict[str, Any] | None:
        """Its message; None if it has ended, or says nothing before it is overdue."""
        self.socket.settimeout(min(max(self.overdue_at - time.monotonic(), 0.001), START_S + GRACE_S))
        try:
            line = self.replies.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def kill(self) -> str:
        """End the process and its children, if it has not ended by itself; how it ended."""
        self.replies.close()
        self.socket.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            status = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:  # in the middle of a system call that nothing can end: leave it behind
            return "it cannot be killed"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def requests(prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, list[Any]]) -> list[bytes]:
    """One message per sample: its prompt, its completion and its row of the columns."""
    assert {len(completions), *map(len, columns.values())} <= {len(prompts)}, (
        "prompts, completions and columns differ in length"
    )
    packed = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        packed.append(pickle.dumps((prompt, completion, {name: values[index] for name, values in columns.items()})))
    return packed
