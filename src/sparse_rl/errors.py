"""User-facing errors and notices. An error is one sentence with a fix; a notice is printed once."""

import functools
import os
import sys
import traceback
import warnings

from .text import message, printable


class UserError(ValueError):
    """Error that the user can fix; the message states the fix. The command line prints the message and exits with code 2."""


class MissingResource(UserError):
    """Error for a resource that is missing but obtainable: the hub does not answer, or a package is not installed.

    A dry run prints the error and continues.
    """


class OutOfMemory(UserError):
    """Raised when a training step does not fit into the GPU's memory. The message suggests settings that need less."""


class RankLost(UserError):
    """Raised when another rank has died. The launcher may restart the ranks."""


class LoggerUnavailable(UserError):
    """Raised when a logger cannot start. A restart may reach its service."""


class Refused(UserError):
    """Raised when another rank has failed with a user error. A restart would fail in the same way."""

    def __init__(self, rank: int, sentence: str):
        super().__init__(sentence)
        self.rank = rank


class StorageUnavailable(UserError):
    """Raised when shared storage does not respond. A retry may succeed."""


class PromptError(UserError):
    """Error for a prompt that cannot be sampled from. The message names the prompt, the problem and the fix."""

    def __init__(self, problem: str, fix: str, *, prompt: str = "The prompt", fits: int | None = None):
        super().__init__(f"{prompt} {problem}: {fix}.")
        self.problem, self.fix = problem, fix
        self.fits = fits
        """Largest response length in tokens that would fit; None if a shorter response does not help."""

    def named(self, prompt: str, fix: str | None = None) -> "PromptError":
        """Return a copy of the error with another prompt name and, if given, another fix."""
        return PromptError(self.problem, fix or self.fix, prompt=prompt, fits=self.fits)


UNREACHABLE = "The hub cannot be reached"
"""First words of every error message about an unreachable hub."""


def first_line(error: BaseException) -> str:
    """Return the first line of the error message without its final period, or the exception's type if the message is empty. A
    line that ends with a colon is continued by the next one."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}".rstrip(".")
    return lines[0].rstrip(".") if lines else type(error).__name__


def quiet_packages() -> None:
    """Silence warnings that a user cannot fix: about torchao's enums, kernels of torchao and bitsandbytes that do not load, and
    flash-linear-attention on a CPU. sparse-rl does not use these there."""
    import logging  # imported here, because every reward worker imports this module

    for name in ("torch.utils._pytree", "torchao", "bitsandbytes.backends.cpu"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Triton is not supported on current platform")


def say(text: str, rank: int | None = None) -> None:
    """Write one line to stderr with control characters escaped. Every line that sparse-rl writes to stderr uses this
    function."""
    mine = os.environ.get("RANK", "0")
    who = rank if rank is not None else int(mine) if mine.isdecimal() else 0
    sys.stderr.write(f"sparse-rl{f', rank {who}' if who else ''}: {message(text)}\n")


def say_error(error: UserError) -> None:
    """Print the error that ends a command. An error from another rank is printed once per machine."""
    if not isinstance(error, Refused):
        say(str(error))
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        say(str(error), error.rank)


@functools.cache
def notice(text: str) -> None:
    """Print one line on stderr. The same text is printed only once."""
    say(text)


def say_unexpected(error: Exception) -> None:
    """Print an unexpected error in one sentence and write its traceback to a file."""
    import tempfile  # likewise

    what = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    try:
        with tempfile.NamedTemporaryFile("w", prefix="sparse-rl-", suffix=".log", delete=False, errors="replace") as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"Details are in {file.name}: please report the error and attach this file"
    except OSError as failed:
        where = f"Details could not be written ({first_line(failed)}): set TMPDIR to a folder with free space and try again"
    say(f"Unexpected error ({printable(what)}). {where}.")
