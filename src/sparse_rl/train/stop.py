"""Handle Ctrl-C and SIGTERM: the first finishes and saves the current step, the second ends the process at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

STOPPING = "Stopping after this step; press Ctrl-C again to drop it."


class StopAsked:
    """Handler of requests to stop: `with StopAsked(tell) as stop:`, then check `stop.asked` between steps."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, tell: Callable[[str], None]):
        self.tell = tell
        self._asked = self._untold = False

    @property
    def asked(self) -> bool:
        if self._untold:
            self._untold = False
            self.tell(STOPPING)
        return self._asked

    def __enter__(self) -> "StopAsked":
        # Only the main thread can handle signals; Ray runs a rank in another.
        here = threading.current_thread() is threading.main_thread()
        self.before = {number: signal.signal(number, self._handle) for number in self.SIGNALS if here}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        try:
            self.tell(STOPPING)
        except RuntimeError:  # the signal interrupted a write
            self._untold = True
