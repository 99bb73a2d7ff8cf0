"""Handle Ctrl-C and SIGTERM. After the first signal the run finishes and saves its step; the second ends it immediately."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

STOPPING = "Stopping after this step. Press Ctrl-C again to stop now and discard the step."


class StopHandler:
    """Signal handler. Use `with StopHandler(announce) as stop:` and check `stop.requested` between steps."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, announce: Callable[[str], None]):
        self.announce = announce
        self._requested = self._unannounced = False

    @property
    def requested(self) -> bool:
        if self._unannounced:
            self._unannounced = False
            self.announce(STOPPING)
        return self._requested

    def __enter__(self) -> "StopHandler":
        # Only the main thread can handle signals; Ray runs ranks in another thread.
        here = threading.current_thread() is threading.main_thread()
        self.before = {number: signal.signal(number, self._handle) for number in self.SIGNALS if here}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        try:
            self.announce(STOPPING)
        except RuntimeError:  # the signal interrupted a write
            self._unannounced = True
