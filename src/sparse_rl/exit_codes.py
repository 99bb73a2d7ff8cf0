"""Convert any exception of a command into one line on the terminal and an exit code. No traceback is printed."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import Refused, UserError, say, say_error, say_unexpected


@contextmanager
def exit_on_error(lower: Callable[[], str]) -> Iterator[None]:
    """Exit with code 2 on a user error, 130 on Ctrl-C and 1 on any other error.

    `lower` returns the names of the options to lower if memory runs out.
    """
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        say_error(error)
        if isinstance(error, Refused) and "RANK" in os.environ:
            sys.stdout.flush()
            os._exit(2)  # a thread may still be waiting for the failed rank
        sys.exit(2)
    except KeyboardInterrupt:
        say("stopped.")
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            sys.exit(1)
        if whose := _memory_ran_out(error):
            say(f"The {whose} memory is exhausted: lower {lower()}, or use a smaller model.")
            sys.exit(2)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            say(f"{error.filename} is too long for a file or folder name: use a shorter name.")
            sys.exit(2)
        say_unexpected(error)
        sys.exit(1)


def _reader_has_gone() -> bool:
    """Return whether the reader of stdout has closed the pipe, as `head` does. The remaining output is then discarded."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _memory_ran_out(error: Exception) -> str | None:
    """Return "GPU's" or "machine's" if the error is out-of-memory on that device; None for any other error."""
    torch = sys.modules.get("torch")  # if torch was not imported, no GPU memory was used
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "GPU's"
    return "machine's" if isinstance(error, MemoryError) else None
