"""Allow one writer per run folder. The file `lock` in the folder names the process that holds the lock.

On one machine, flock protects the folder, and the lock of a dead process is free. A holder on another machine, or on storage
without flock, counts as alive while its heartbeat changes. Clocks of different machines are never compared. A run that is
restarted by its own launcher takes over its previous lock.
"""

import fcntl
import getpass
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from ..backup import LOCK
from ..errors import UserError, notice
from .storage import Place, opened, storage_errors

BEAT_S = 15.0
"""Seconds between two heartbeats."""
EXPIRES_S = 90.0
"""Seconds without a heartbeat after which a process on another machine counts as dead."""
SETTLE_S = 1.0
"""Seconds to wait before re-reading a lock file written without flock, because two processes may have written it."""
ATTEMPTS = 20
"""Maximum number of attempts to take a lock while other processes also take or release it."""


@dataclass(frozen=True)
class Holder:
    host: str = "?"
    pid: int = 0
    user: str = "?"
    since: str = "?"
    launch: str = ""
    """Id that all restarts by one launcher share; see `distributed.launch`."""
    boot: str = ""
    """Id of the machine's current boot."""
    namespace: str = ""
    """PID namespace of the process. Each container has a separate one."""
    ticks: str = ""
    """Start time of the process in ticks since boot. It distinguishes processes that reuse a pid."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"

    @property
    def same_machine(self) -> bool:
        return bool(self.boot) and self.boot == _boot()

    @property
    def is_alive(self) -> bool | None:
        """True if the process is alive; None if it runs on another machine or in another PID namespace."""
        if not (self.same_machine and self.namespace and self.namespace == _namespace()):
            return None
        return _ticks(self.pid) == self.ticks


def this_process(launch: str) -> Holder:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user name
        user = f"user {os.getuid()}"
    since = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    ticks = _ticks(os.getpid()) or ""
    return Holder(socket.gethostname(), os.getpid(), user, since, launch, _boot(), _namespace(), ticks)


class RunLock:
    def __init__(self, run: Place, launch: str = ""):
        self.run, self.holder = run, this_process(launch)
        self.lost = False
        """True if another process took the lock because this process sent no heartbeat for too long."""
        self._file: _OnDisk | _OnStorage = _OnDisk(run) if isinstance(run, Path) else _OnStorage(run)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, or raise a UserError that names its holder."""
        for _ in range(ATTEMPTS):
            if self._try_acquire():
                break
        else:
            raise self._refusal(self._file.read()[0])
        self._thread = threading.Thread(target=self._heartbeat, name="run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        if not self.lost:
            with suppress(OSError, UserError):  # a lock that is not removed expires
                self._file.remove(self.holder)
        self._file.close()

    def _try_acquire(self) -> bool:
        """Try once to take the lock. Return True on success, False if the caller should retry."""
        exclusive = self._file.open()
        holder, _ = self._file.read()
        if exclusive is False and holder and holder.is_alive is False:  # a child process of the dead holder has flock
            self._file.remove(holder)
            return False
        if not self._is_free(exclusive, holder):
            if exclusive is False:
                self._file.close()
                if holder is None or (holder.launch and holder.launch == self.holder.launch):
                    self._wait_for_flock(holder)
                    return False
                raise self._refusal(holder)
            if holder and holder.is_alive:
                self._file.close()
                raise self._refusal(holder)
            self._wait_for_heartbeat(holder)
        self._file.write(self.holder)
        if not exclusive:
            time.sleep(SETTLE_S)
        return self._is_mine()

    def _is_free(self, exclusive: bool | None, holder: Holder | None) -> bool:
        if exclusive is False:
            return False
        if holder is None:
            return True
        restarted = bool(holder.launch) and holder.launch == self.holder.launch
        return restarted or holder.is_alive is False or (bool(exclusive) and holder.same_machine)

    def _wait_for_flock(self, holder: Holder | None) -> None:
        """Wait until flock is free or its holder changes; raise UserError on a timeout.

        If `holder` is None, a starting process holds flock and has not written its name yet. Otherwise the holder belongs to
        an earlier start by the same launcher and is about to end.
        """
        ends = time.monotonic() + (EXPIRES_S if holder else 2 * SETTLE_S)
        while time.monotonic() < ends:
            time.sleep(SETTLE_S / 10)
            free = self._file.open() is not False
            now, _ = self._file.read()
            self._file.close()
            if free or now != holder:
                return
        raise self._refusal(holder)

    def _wait_for_heartbeat(self, holder: Holder | None) -> None:
        notice(f"{self.run} may be in use by {holder}: waiting {EXPIRES_S:g} s for a heartbeat.")
        before = self._file.read()
        ends = time.monotonic() + EXPIRES_S
        while time.monotonic() < ends:
            time.sleep(min(SETTLE_S, EXPIRES_S / 10))
            now = self._file.read()
            if now[0] is None:  # the holder has ended
                return
            if now != before:
                self._file.close()
                raise self._refusal(now[0])
        notice(f"{self.run} was in use by {holder}, whose heartbeat stopped. This run takes over the folder.")

    def _is_mine(self) -> bool:
        holder, _ = self._file.read()
        if holder is not None and holder.token == self.holder.token:
            return True
        self._file.close()
        return False

    def _refusal(self, holder: Holder | None) -> UserError:
        return UserError(
            f"{self.run} is in use by {holder or 'a process that is about to start'}: wait for it, stop it, or use another "
            "--run-dir."
        )

    def _heartbeat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(Exception):  # a temporary outage of the storage
                holder, _ = self._file.read()
                if holder is not None and holder.token != self.holder.token:
                    self.lost = True
                    return
                self._file.beat(self.holder, missing=holder is None)


class _OnDisk:
    def __init__(self, run: Path):
        self.path = run / LOCK
        self._fd: int | None = None

    def open(self) -> bool | None:
        """Try to take flock. Return True on success, False if another process holds it, None if flock is not supported."""
        self.close()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                return True
        except FileNotFoundError:
            pass
        return self.open()  # the file was deleted between open and flock

    def read(self) -> tuple[Holder | None, Any]:
        """Return (holder, heartbeat) from the current lock file. It may differ from the file this process has open."""
        try:
            with self.path.open("rb") as file:
                return _parsed(file.read()), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None, None

    def write(self, holder: Holder) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(self._fd, "wb", closefd=False) as file:  # writes everything or raises
            file.write(json.dumps(asdict(holder)).encode())

    def beat(self, holder: Holder, *, missing: bool) -> None:
        if missing and self.open() is False:
            return
        if missing:
            self.write(holder)
        assert self._fd is not None
        os.utime(self._fd)

    def remove(self, holder: Holder) -> None:
        now, _ = self.read()
        if now == holder:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _OnStorage:
    """A lock file on shared storage, which has neither flock nor rename. The last process that wrote it holds the lock."""

    def __init__(self, run: str):
        self.run = run
        self.fs, path = opened(run)
        self.file = f"{path.rstrip('/')}/{LOCK}"

    def open(self) -> None:
        return None

    def read(self) -> tuple[Holder | None, Any]:
        with storage_errors(self.run, "read"):
            self.fs.invalidate_cache()
            try:
                text = self.fs.cat_file(self.file)
            except FileNotFoundError:
                return None, None
        return _parsed(text), text

    def write(self, holder: Holder, beat: int = 0) -> None:
        with storage_errors(self.run, "written"):
            if self.file.startswith("/"):  # object stores have no folders
                self.fs.makedirs(os.path.dirname(self.file), exist_ok=True)
            self.fs.pipe_file(self.file, json.dumps(asdict(holder) | {"beat": beat}).encode())

    def beat(self, holder: Holder, *, missing: bool) -> None:
        self.write(holder, time.monotonic_ns())

    def remove(self, holder: Holder) -> None:
        now, _ = self.read()
        if now == holder:
            with storage_errors(self.run, "written"):
                self.fs.rm_file(self.file)

    def close(self) -> None:
        pass


def _parsed(text: bytes) -> Holder | None:
    """Return the holder; None if the file is invalid, e.g. truncated by a kill."""
    try:
        values = json.loads(text)
        return Holder(**{each.name: values[each.name] for each in fields(Holder) if each.name in values})
    except (ValueError, TypeError, RecursionError):
        return None


def process_name(pid: int) -> str:
    """Return a unique name of the process. The pid alone is not unique: containers share pids, and the kernel reuses them."""
    return f"{socket.gethostname()} {_boot()} {_namespace()} {pid} {_ticks(pid)}"


def _boot() -> str:
    return _text("/proc/sys/kernel/random/boot_id") or socket.gethostname()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _ticks(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; None if no such process runs."""
    stat = _text(f"/proc/{pid}/stat")
    if stat is None:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
