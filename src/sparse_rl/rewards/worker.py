"""The far end of a `RewardPool`: a process that imports the reward and grades one sample at a time.

It is started as a fresh interpreter and imports no torch, so it is ready in a few hundredths of a second and a crash in it
is nobody else's. Requests are pickled and come with their length before them; replies are lines of JSON.
"""

import faulthandler
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from ..errors import UserError
from .find import one_line
from .several import Reward, refuse_if_not_finite, reward_of

START_S = 120.0
"""How long the function's module may take to import."""
LENGTH_BYTES = 8


def main(fd: int, function: str, timeout_s: float) -> None:
    """Grades until the trainer closes its end or is gone, then ends with what processes the function left in its group."""
    assert os.getpgrp() == os.getpid(), "killing the group must not reach the trainer"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business
    os.set_inheritable(fd, False)
    sys.path.insert(0, os.getcwd())
    try:
        serve(socket.socket(fileno=fd), function, timeout_s)
    except ConnectionError:
        pass  # the trainer is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)


def serve(channel: socket.socket, spec: str, timeout_s: float) -> None:
    def reply(**message: Any) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    requests = channel.makefile("rb")
    with Limit(START_S):
        try:
            function = reward_of(spec)
        except UserError as error:
            return reply(refused=str(error))
    if memory_bytes := getattr(function, "memory_bytes", None):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    reply(ready=True)
    while length := requests.read(LENGTH_BYTES):
        request = requests.read(int.from_bytes(length, "big"))
        with Limit(timeout_s):
            message = grade(function, request)
        reply(**message)
    return None


class Limit:
    """Ends this process if the block takes longer, leaving its traceback in the log.

    The clock is a thread in C: it works while the function holds the interpreter's lock, and when the trainer was killed
    and nobody is left to kill us.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=2)

    def __exit__(self, *exception: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def grade(function: Reward, request: bytes) -> dict[str, Any]:
    try:
        prompt, completion, columns = pickle.loads(request)
        (verdict,) = function([prompt], [completion], **{name: [value] for name, value in columns.items()})
        refuse_if_not_finite(verdict.total)
        return {"value": verdict.total, "parts": verdict.parts}
    except BaseException as error:
        traceback.print_exc(file=sys.__stderr__)
        return {"error": one_line(error)}
