"""Errors and notices for the user: mistakes in one sentence with the remedy, and unexpected conditions, each said once."""

import functools
import logging
import os
import sys
import tempfile
import traceback

from .text import message, printable


class UserError(ValueError):
    """A mistake that the user can fix. The message says how. The command line prints it and exits with 2."""


class MissingResource(UserError):
    """A resource that is missing but obtainable: on a hub that does not answer, or in a package that is not installed.

    A dry run reports it and goes on.
    """


class RankLost(UserError):
    """Another rank is gone; the launcher may start the ranks again."""


class Refused(UserError):
    """The refusal of another rank. Another start would end the same way."""

    def __init__(self, rank: int, sentence: str):
        super().__init__(sentence)
        self.rank = rank


class StorageUnavailable(UserError):
    """Shared storage does not answer. A later attempt may succeed."""


class PromptError(UserError):
    """A prompt that cannot be sampled from: its name, the problem with it and the fix."""

    def __init__(self, problem: str, fix: str, *, prompt: str = "The prompt", fits: int | None = None):
        super().__init__(f"{prompt} {problem}: {fix}.")
        self.problem, self.fix = problem, fix
        self.fits = fits
        """Response tokens that would fit, if a smaller number helps."""

    def named(self, prompt: str, fix: str | None = None) -> "PromptError":
        """Return the same error with the name that the user knows the prompt by, and another fix if one is given."""
        return PromptError(self.problem, fix or self.fix, prompt=prompt, fits=self.fits)


UNREACHABLE = "The hub cannot be reached"
"""Start of every message about an unreachable hub."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error without its full stop, or its type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def without_torchaos_warnings() -> None:
    """Silence a warning of torch about how torchao registers its enums. A user cannot fix it."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def say(text: str, rank: int | None = None) -> None:
    """Write one safe line to stderr. All our output to stderr goes through this function."""
    mine = os.environ.get("RANK", "0")
    who = rank if rank is not None else int(mine) if mine.isdecimal() else 0
    sys.stderr.write(f"sparse-rl{f', rank {who}' if who else ''}: {message(text)}\n")


def say_error(error: UserError) -> None:
    """Print the error that ends a command. The error of another rank is printed once per machine."""
    if not isinstance(error, Refused):
        say(str(error))
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        say(str(error), error.rank)


@functools.cache
def notice(text: str) -> None:
    """Print one line on the terminal, once per text."""
    say(text)


def say_unexpected(error: Exception) -> None:
    """Print an unforeseen error in one sentence, and write its traceback to a file."""
    what = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    try:
        with tempfile.NamedTemporaryFile("w", prefix="sparse-rl-", suffix=".log", delete=False, errors="replace") as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"Details are in {file.name}: please report it with that file"
    except OSError as failed:
        where = f"Its details could not be written ({first_line(failed)}): set TMPDIR to a folder with space and try again"
    say(f"Unexpected error ({printable(what)}). {where}.")
