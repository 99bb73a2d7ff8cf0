"""Trainer-side handle of one reward worker: its process, socket and samples in flight."""

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .find import INSIDE
from .worker import LENGTH_BYTES, NUMBER_BYTES, START_S

GRACE_S = 0.5
"""Grace period in seconds after the time limit before a worker is killed. A worker normally exits at the limit itself and
writes a traceback to the log."""
END_S = 5.0
"""Seconds within which a supervisor must end its worker and all processes that the worker started."""
LINE_BYTES = 2**20
"""Maximum length of a message in bytes."""
START = -1
"""Sample number used while the worker imports the function."""


class Worker:
    """Handle of one worker process.

    The worker first imports the function, and `at_once` is 0 until then. It then grades the samples in `in_flight`, a mapping
    from request number to sample.
    """

    def __init__(self, function: str, timeout_s: float, log: Path | None):
        self.timeout_s = timeout_s
        self.socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]}; from {__package__}.worker import main; "
        code += f"main({theirs.fileno()}, {function!r}, {timeout_s!r}, {os.getpid()})"
        with theirs, open(log or os.devnull, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],  # -u: unbuffered, so that output before a kill reaches the log
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, INSIDE: "1"},
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach the worker
            )
        self.in_flight: dict[int, int] = {}
        self.at_once = 0
        self.alone = False
        """True if the worker grades a sample that must be the only one in flight."""
        self.retiring = False
        """True if the worker is to be replaced once it is idle, because a sample that timed out may have left something
        running."""
        self.ended = False
        self.strays = 0
        self._unread = b""
        self.late_at = math.inf
        self.ask(START, b"")
        self.late_at = time.monotonic() + START_S

    @property
    def ready(self) -> bool:
        return self.at_once > 0

    @property
    def idle(self) -> bool:
        return self.ready and not self.in_flight and not self.retiring

    @property
    def has_room(self) -> bool:
        return self.ready and not self.alone and not self.retiring and len(self.in_flight) < self.at_once

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.late_at

    @property
    def overdue_at(self) -> float:
        return self.late_at + GRACE_S

    def ask(self, sample: int, request: bytes, *, alone: bool = False) -> None:
        if not self.in_flight:
            self.late_at = time.monotonic() + self.timeout_s
        number = secrets.randbits(8 * NUMBER_BYTES)
        self.in_flight[number], self.alone = sample, alone
        self.socket.settimeout(self.timeout_s)
        with suppress(OSError):  # if the worker has exited or does not read, the reply is missing
            self.socket.sendall(number.to_bytes(NUMBER_BYTES, "big") + len(request).to_bytes(LENGTH_BYTES, "big") + request)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the received messages with their samples.

        Sets `ended` if the worker has exited, and counts lines that match no request.
        """
        self.socket.setblocking(False)
        try:
            data = self.socket.recv(1 << 16)
            self.ended = not data
        except BlockingIOError:
            data = b""
        except OSError:
            data, self.ended = b"", True
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > LINE_BYTES:
            self._unread = b""
            self.strays += 1
        return [reply for line in lines if line and (reply := self._parse_reply(line))]

    def _parse_reply(self, line: bytes) -> tuple[int, dict[str, Any]] | None:
        message: Any = None
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
        number = message.get("number") if isinstance(message, dict) else None
        if not isinstance(number, int) or number not in self.in_flight:
            self.strays += 1
            return None
        sample = self.in_flight[number]
        if "started" not in message:
            del self.in_flight[number]
        self.late_at = time.monotonic() + self.timeout_s if self.in_flight else math.inf
        message["alone"], self.alone = self.alone, self.alone and bool(self.in_flight)
        return sample, message

    def disconnect(self) -> None:
        """Close the connection, which makes the supervisor end the worker and all processes that it started."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> str:
        """End the worker if it still runs. Return how it ended, e.g. "SIGKILL" or "exit status 1"."""
        self.disconnect()
        self.socket.close()
        try:
            status = self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)  # the worker is killed together with its supervisor
            try:
                status = self.process.wait(timeout=1)
            except subprocess.TimeoutExpired:  # the process is in an uninterruptible system call and is left behind
                return "it cannot be killed"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"
