"""What a user should know: mistakes in one sentence with the remedy, and what runs otherwise than expected, said once."""

import functools
import logging
import os
import sys
import tempfile
import traceback

from .text import message, printable


class UserError(ValueError):
    """A mistake that the user can fix. The message says how. The command line prints it and exits with 2."""


class Absent(UserError):
    """Not here, but to be had: on a hub that does not answer, in a package that is not installed. To a dry run that is news,
    not a mistake."""


class RankLost(UserError):
    """Another rank is gone: who started the ranks may start them again."""


class Refused(UserError):
    """What another rank was refused with. Another start would end the same way."""

    def __init__(self, rank: int, sentence: str):
        super().__init__(sentence)
        self.rank = rank


class Unanswered(UserError):
    """Storage that does not answer: it may, the next time."""


UNREACHABLE = "The hub cannot be reached"
"""How a sentence about a hub that does not answer starts."""


def first_line(error: BaseException) -> str:
    """What an error says, for a sentence of ours: its first line without the full stop, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def without_torchaos_warnings() -> None:
    """It registers its enums in a way that torch warns of: nothing a user can mend."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def say(text: str, rank: int | None = None) -> None:
    """One line on the terminal, whatever the text holds: everything we write to stderr comes through here."""
    mine = os.environ.get("RANK", "0")
    who = rank if rank is not None else int(mine) if mine.isdecimal() else 0
    sys.stderr.write(f"sparse-rl{f', rank {who}' if who else ''}: {message(text)}\n")


def say_error(error: UserError) -> None:
    """What ends a command; what another rank has said, once on every machine."""
    if not isinstance(error, Refused):
        say(str(error))
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        say(str(error), error.rank)


@functools.cache
def notice(text: str) -> None:
    """One line on the terminal, once."""
    say(text)


def say_unexpected(error: Exception) -> None:
    """What no one foresaw, in one sentence; the traceback goes to a file for whoever mends it."""
    what = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    try:
        with tempfile.NamedTemporaryFile("w", prefix="sparse-rl-", suffix=".log", delete=False, errors="replace") as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"Details are in {file.name}: please report it with that file"
    except OSError as failed:
        where = f"Its details could not be written ({first_line(failed)}): set TMPDIR to a folder with space and try again"
    say(f"Unexpected error ({printable(what)}). {where}.")
