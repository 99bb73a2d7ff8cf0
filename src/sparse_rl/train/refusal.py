"""A refusal of one rank ends all of them, each with its sentence, within seconds and for good.

The rank that refuses publishes its sentence in the store that all ranks share. A thread in every rank looks for it there and
interrupts what the rank does, or ends the process where it cannot be interrupted. torchrun starts ended ranks again whatever
the reason: so its own store keeps the sentence, and each later start ends with it at once.
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

from ..errors import RankLost, Refused, Unanswered, UserError, first_line, say_error

LOOK_S = 0.5
"""Between two looks into the store."""
TOGETHER_S = 5.0
"""The longest that a rank which has unwound waits for the others: torchrun signals them as soon as one is gone."""
GRACE_S = 20.0
"""In which a rank has to unwind, with all that it writes."""
KEY = "refused"


class Interrupted(BaseException):
    """Raised in the middle of what a rank does when another one has refused."""


def is_final(error: BaseException) -> bool:
    """Whether another start would end the same way."""
    return isinstance(error, UserError) and not isinstance(error, RankLost | Unanswered)


class Watch(threading.Thread):
    """Looks for what another rank has published, from `with` to its end, and interrupts the thread that has opened it."""

    def __init__(self, store: Any, rank: int, size: int):
        super().__init__(name="refusals", daemon=True)
        self.store, self.rank, self.size = store.clone(), rank, size  # a connection of its own: others may block
        self.watched: int | None = threading.get_ident()
        self.over, self.lock = threading.Event(), threading.Lock()
        self.heard: dict[str, Any] | None = None
        self.gone = False
        """The store, with the rank that held it."""

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self.join()
        if self.heard and self.heard["final"]:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, to ranks that have yet to say why
            self._leave_together()

    def _leave_together(self) -> None:
        ends = time.monotonic() + TOGETHER_S
        with suppress(RuntimeError):  # the first rank, which holds the store, was faster
            left = self.store.add("left", 1)
            while left < self.size and time.monotonic() < ends:
                time.sleep(0.02)
                left = self.store.add("left", 0)
        if self.rank == 0:
            time.sleep(0.2)  # in which the others see it

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Publish what the block raises; where another rank was first, raise its sentence instead."""
        try:
            try:
                yield
            finally:
                with self.lock:
                    self.watched = None  # no more to be interrupted
        except (Exception, Interrupted) as error:
            if not isinstance(error, RankLost | Interrupted):
                self._publish(error)
            self.look()
            if self.heard and self.heard["rank"] != self.rank:
                raise self._told() from None
            raise

    def _publish(self, error: BaseException) -> None:
        said = str(error) if is_final(error) else first_line(error)
        value = json.dumps({"rank": self.rank, "said": said, "final": is_final(error)})
        with suppress(RuntimeError):  # the store is gone, and with it all who could look
            self.store.compare_set(KEY, "", value)

    def look(self) -> bool:
        """Whether a rank has refused."""
        with self.lock:
            if self.heard is None and not self.gone:
                try:
                    if self.store.check([KEY]):
                        self.heard = json.loads(self.store.get(KEY))
                except RuntimeError:
                    self.gone = True
            return self.heard is not None

    def _told(self) -> UserError:
        assert self.heard is not None
        if self.heard["rank"] == self.rank:
            return UserError(self.heard["said"])
        if self.heard["final"]:
            return Refused(self.heard["rank"], self.heard["said"])
        return RankLost(f"Rank {self.heard['rank']} failed ({self.heard['said']}): see what it says.")

    def run(self) -> None:
        while not self.look():
            if self.over.wait(LOOK_S) or self.gone:
                return
        with self.lock:
            assert self.heard is not None
            if self.watched and self.heard["rank"] != self.rank:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.watched), ctypes.py_object(Interrupted))
        if not self.over.wait(GRACE_S):  # it waits outside of Python, as for a GPU that waits for the rank that is gone
            say_error(self._told())
            os._exit(2)


# Later starts of one launch


def refuse_again(known: Any) -> None:
    """Raise what an earlier start of this launch was refused with."""
    if known.check([KEY]):
        earlier = json.loads(known.get(KEY))
        raise Refused(earlier["rank"], earlier["said"])


@contextmanager
def refused_for_good() -> Iterator[None]:
    """Keep a refusal where later starts of the same launch find it, and ranks that have not met yet."""
    try:
        yield
    except UserError as error:
        if is_final(error) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank = error.rank if isinstance(error, Refused) else int(os.environ.get("RANK", "0"))
            with suppress(Exception):  # what is refused is what matters
                import torch.distributed as dist

                known = next(dist.rendezvous("env://", timeout=timedelta(seconds=TOGETHER_S)))[0]
                known.compare_set(KEY, "", json.dumps({"rank": rank, "said": str(error)}))
        raise
