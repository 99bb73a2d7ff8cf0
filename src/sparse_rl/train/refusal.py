"""Stop all ranks within seconds, with the same message, when one rank fails.

The failing rank publishes its message in the store that all ranks share. A thread in every rank polls the store. The thread
interrupts its rank, or ends the process if the rank cannot be interrupted. torchrun restarts failed ranks for any reason. For
an error that a restart cannot fix, the message is also stored in torchrun's store, and each restart raises it immediately.
"""

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from ..errors import LoggerUnavailable, RankLost, Refused, StorageUnavailable, UserError, first_line, say_error

POLL_S = 0.5
"""Seconds between two reads of the store."""
EXIT_TOGETHER_S = 5.0
"""Maximum seconds that a failed rank waits for the other ranks before it exits. torchrun signals them once one rank exits."""
GRACE_S = 20.0
"""Seconds that an interrupted rank has to clean up and finish its writes before its process is ended."""
KEY = "refused"


class Interrupted(BaseException):
    """Raised asynchronously in a rank when another rank has failed."""


def is_final(error: BaseException) -> bool:
    """Return whether a restart would fail again: True for every UserError that a lost rank or an unreachable service did not cause."""
    return isinstance(error, UserError) and not isinstance(error, RankLost | StorageUnavailable | LoggerUnavailable)


class RefusalWatcher(threading.Thread):
    """Thread that polls for errors of other ranks during its `with` block, and interrupts the block's thread on an error."""

    def __init__(self, store: Any, rank: int, size: int):
        super().__init__(name="refusals", daemon=True)
        self.store, self.rank, self.size = store.clone(), rank, size  # calls on the shared connection may block
        self.watched_thread: int | None = threading.get_ident()
        self.over, self.lock = threading.Event(), threading.Lock()
        self.refusal: dict[str, Any] | None = None
        self.gone = False
        """True if the store is unreachable because the rank that hosts it has ended."""

    def __enter__(self) -> "RefusalWatcher":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self.join()
        if self.refusal and self.refusal["final"]:
            if threading.current_thread() is threading.main_thread():
                # torchrun sends SIGTERM to ranks that may not have printed their error yet.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        ends = time.monotonic() + EXIT_TOGETHER_S
        with suppress(RuntimeError):  # rank 0, which hosts the store, may have ended
            left = self.store.add("left", 1)
            while left < self.size and time.monotonic() < ends:
                time.sleep(0.02)
                left = self.store.add("left", 0)
        if self.rank == 0:
            time.sleep(0.2)  # give the other ranks time to read the count

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish an error raised in the block to all ranks. If another rank failed first, raise that rank's error instead."""
        try:
            try:
                yield
            finally:
                with self.lock:
                    self.watched_thread = None  # stop interrupting this thread
        except (Exception, Interrupted) as error:
            if not isinstance(error, RankLost | Interrupted):
                self._publish(error)
            self.check()
            if self.refusal and self.refusal["rank"] != self.rank:
                raise self._error() from None
            raise

    def _publish(self, error: BaseException) -> None:
        message = str(error) if is_final(error) else first_line(error)
        value = json.dumps({"rank": self.rank, "message": message, "final": is_final(error)})
        with suppress(RuntimeError):  # the store is gone, so no rank can read it
            self.store.compare_set(KEY, "", value)

    def check(self) -> bool:
        """Return whether any rank has published an error."""
        with self.lock:
            if self.refusal is None and not self.gone:
                try:
                    if self.store.check([KEY]):
                        self.refusal = json.loads(self.store.get(KEY))
                except RuntimeError:
                    self.gone = True
            return self.refusal is not None

    def _error(self) -> UserError:
        assert self.refusal is not None
        if self.refusal["rank"] == self.rank:
            return UserError(self.refusal["message"])
        if self.refusal["final"]:
            return Refused(self.refusal["rank"], self.refusal["message"])
        return RankLost(f"Rank {self.refusal['rank']} failed ({self.refusal['message']}): see the output of that rank.")

    def run(self) -> None:
        while not self.check():
            if self.over.wait(POLL_S) or self.gone:
                return
        with self.lock:
            assert self.refusal is not None
            if self.watched_thread and self.refusal["rank"] != self.rank:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.watched_thread), ctypes.py_object(Interrupted))
        if not self.over.wait(GRACE_S):  # the rank is blocked outside Python, e.g. in NCCL
            say_error(self._error())
            os._exit(2)


# Restarts by the same launcher


def refuse_again(known: Any) -> None:
    """Raise the error that an earlier start by this launcher stored, if there is one. `known` is the launcher's store."""
    if known.check([KEY]):
        earlier = json.loads(known.get(KEY))
        raise Refused(earlier["rank"], earlier["message"])


@contextmanager
def refused_for_good() -> Iterator[None]:
    """Store a final error of the block (see `is_final`) in torchrun's store, for restarts and ranks that join later."""
    try:
        yield
    except UserError as error:
        if is_final(error) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank = error.rank if isinstance(error, Refused) else int(os.environ.get("RANK", "0"))
            with suppress(Exception):  # raise the original error, even if storing it fails
                import torch.distributed as dist

                known = next(dist.rendezvous("env://", timeout=timedelta(seconds=EXIT_TOGETHER_S)))[0]
                known.compare_set(KEY, "", json.dumps({"rank": rank, "message": str(error)}))
        raise
