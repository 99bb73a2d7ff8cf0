"""Supervisor process between the trainer and a reward worker. It ends all processes that the worker started, even if the
trainer is killed.

The worker is a child of the supervisor. On Linux, orphaned descendants of the worker are re-parented to the supervisor, so it
also finds daemons that left the worker's process group. On other systems it ends only the worker's process group.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 1.0
"""Seconds between checks that the trainer still runs. The socket alone does not show that: a process forked by the trainer may
keep the trainer's end open."""
END_S = 1.0
"""Seconds during which the supervisor tries to end the remaining processes. A process in an uninterruptible system call is
left behind."""


def fork_worker(channel: int, trainer: int) -> None:
    """Fork the worker and return in the child. The parent becomes the supervisor and never returns."""
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        os.close(wakeup_read)
        os.close(wakeup_write)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # SIGINT stays ignored: the trainer handles Ctrl-C
        os.setpgid(0, 0)
        set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    with suppress(OSError):
        os.setpgid(worker, worker)
    status = watch(channel, wakeup_read, worker, trainer)
    kill_all(worker)
    exit_like(status)


def set_process(option: int, value: int) -> None:
    """Call prctl(2) on Linux; do nothing on other systems."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def watch(channel: int, wakeup_read: int, worker: int, trainer: int) -> int | None:
    """Wait until the worker has exited and return its status. Return None if the trainer closed the connection or has
    exited."""
    events = select.poll()
    events.register(channel, 0)  # poll always reports a closed connection; only the worker reads requests
    events.register(wakeup_read, select.POLLIN)
    while True:
        closed = any(fd == channel for fd, _ in events.poll(POLL_S * 1000))
        with suppress(BlockingIOError):
            os.read(wakeup_read, 1 << 16)
        status = reap(worker)
        if status is not None or closed or os.getppid() != trainer:
            return status


def reap(worker: int) -> int | None:
    """Reap all children that have exited. Return the worker's status if the worker is among them, else None."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                found = ended[1]
    return found


def kill_all(worker: int) -> None:
    """Kill the worker's process group and all descendants until none is left or `END_S` has passed."""
    until = time.monotonic() + END_S
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while time.monotonic() < until:
        for process in descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def descendants() -> list[int]:
    """Return the process ids of all descendants of this process, or an empty list if /proc does not exist."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found, left = [], children.get(os.getpid(), [])
    while left:
        found.append(process := left.pop())
        left += children.get(process, [])
    return found


def exit_like(status: int | None) -> None:
    """Exit with the worker's exit status or signal, which the trainer reads from this process."""
    if status is None or not os.WIFSIGNALED(status):
        os._exit(0 if status is None else os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # SIGKILL cannot have a handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(1)
