"""Worker side of a `RewardPool`: a process that imports the reward and grades one sample at a time.

An `async def` reward grades up to `AT_ONCE` samples concurrently on one event loop, each with its own time limit.

The worker is a fresh interpreter that imports no torch. It is therefore ready in a few hundredths of a second, and its crash
affects no other process. A request consists of its number, its length and a pickle. A reply is a line of JSON with the
request's number. The number is random, so text that a reward writes to the socket is not mistaken for a reply.
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
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from .find import one_line
from .supervisor import fork_worker
from .weighted_sum import Reward, RewardSum, event_loop, fault_of

START_S = 120.0
"""Time limit in seconds for importing the function's module."""
NUMBER_BYTES = LENGTH_BYTES = 8
AT_ONCE = 16
"""Maximum samples that one worker grades concurrently with an async reward."""
SLACK_S = 0.25
"""Seconds after the samples' time limit at which a worker with an async reward exits, because its event loop is blocked."""
TICK_S = 0.05
BLOCKED = 0.1
"""Fraction of the time limit. If the event loop was blocked for longer, another sample may have caused the timeout."""

Reply = Callable[..., None]


def main(fd: int, function: str, timeout_s: float, trainer: int) -> None:
    """Grade samples until the trainer closes the connection or exits. The supervisor then ends this process and all processes
    that it started."""
    fork_worker(fd, trainer)
    os.set_inheritable(fd, False)
    sys.path.insert(0, os.getcwd())
    try:
        serve(socket.socket(fileno=fd), function, timeout_s)
    except ConnectionError:
        pass  # the trainer has exited
    except BaseException:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)  # also ends threads


def serve(channel: socket.socket, spec: str, timeout_s: float) -> None:
    me = os.getpid()

    def reply(number: int, **message: Any) -> None:
        if os.getpid() != me:
            os._exit(1)  # this is a process forked by the reward: only its parent may reply
        channel.sendall(b"\n" + json.dumps({"number": number, **message}).encode() + b"\n")

    number, _ = read_request(channel)
    with Limit(START_S):
        try:
            reward = Reward(spec)
        except UserError as error:
            return reply(number, refused=str(error))
    if reward.memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (reward.memory_bytes, reward.memory_bytes))
    reply(number, ready=AT_ONCE if reward.is_async else 1)
    if reward.is_async:
        return event_loop().run(serve_together(channel, reward, timeout_s, reply))
    while True:
        number, request = read_request(channel)
        with Limit(timeout_s):
            message = grade(reward, request)
        reply(number, **message)


def read_request(channel: socket.socket) -> tuple[int, bytes]:
    header = exactly(channel, NUMBER_BYTES + LENGTH_BYTES)
    return int.from_bytes(header[:NUMBER_BYTES], "big"), exactly(channel, int.from_bytes(header[NUMBER_BYTES:], "big"))


def exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError
        data += part
    return bytes(data)


class Limit:
    """Context manager that ends this process if the block exceeds the time limit, and writes a traceback to the log.

    The timer is a C thread, so it also works while the function holds the GIL.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        self.restart()

    def restart(self) -> None:
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=2)

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def grade(reward: Reward, request: bytes) -> dict[str, Any]:
    try:
        prompt, completion, columns = pickle.loads(request)
        (verdict,) = reward([prompt], [completion], {name: [value] for name, value in columns.items()})
        return reply_of(verdict)
    except BaseException as error:
        return failed(error)


def reply_of(verdict: RewardSum) -> dict[str, Any]:
    if fault := fault_of(verdict):
        raise ValueError(fault)
    return {"value": verdict.total, "parts": verdict.parts}


def failed(error: BaseException) -> dict[str, Any]:
    traceback.print_exception(error, file=sys.__stderr__)
    return {"error": one_line(error)}


async def serve_together(channel: socket.socket, reward: Reward, timeout_s: float, reply: Reply) -> None:
    """Grade samples concurrently and reply to each when it is done.

    While samples are in flight, a message is sent at least every `timeout_s` seconds. If none is sent, a sample is blocking
    the event loop: the process exits, and the pool submits the other samples again.
    """
    import asyncio

    loop, limit = asyncio.get_running_loop(), Limit(timeout_s + SLACK_S)
    tasks: set[asyncio.Task] = set()
    blocked_s = 0.0

    async def tick() -> None:
        nonlocal blocked_s
        while True:
            before = loop.time()
            await asyncio.sleep(TICK_S)
            blocked_s += max(0.0, loop.time() - before - 2 * TICK_S)

    async def grade_one(number: int, request: bytes) -> None:
        limit.restart()
        # the time limit starts here, because the sample may have waited while others blocked the loop
        reply(number, started=True)
        before = blocked_s
        try:
            async with asyncio.timeout(timeout_s) as clock:
                prompt, completion, columns = pickle.loads(request)
                (verdict,) = await reward.graded([prompt], [completion], {name: [value] for name, value in columns.items()})
                message = reply_of(verdict)
        except BaseException as error:
            message = failed(error)
        if clock.expired():  # also true if the reward caught the cancellation
            message = {"late": True, "blocked": blocked_s - before > BLOCKED * timeout_s}
        tasks.discard(asyncio.current_task())
        limit.restart() if tasks else limit.stop()
        reply(number, **message)

    ticking = asyncio.create_task(tick())
    # keep a reference to the writer: without it the loop stops reading
    reader, writer = await asyncio.open_unix_connection(sock=channel.dup())
    channel.settimeout(START_S)  # the socket is non-blocking now, and a reply must be sent completely
    try:
        while True:
            header = await reader.readexactly(NUMBER_BYTES + LENGTH_BYTES)
            request = await reader.readexactly(int.from_bytes(header[NUMBER_BYTES:], "big"))
            tasks.add(asyncio.create_task(grade_one(int.from_bytes(header[:NUMBER_BYTES], "big"), request)))
    except asyncio.IncompleteReadError:
        raise ConnectionError from None  # the trainer has exited
    finally:
        ticking.cancel()
        writer.close()
