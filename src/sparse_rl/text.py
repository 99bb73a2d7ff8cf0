"""Make text from outside safe to show: from a model, a folder's name, a file."""

import re
import reprlib
import unicodedata
from collections.abc import Iterable

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's control, format (such as right-to-left marks), surrogate, private and unassigned characters, and odd line ends."""


def printable(text: str, most: int = 400, keep: str = "") -> str:
    """Return one line without terminal commands, legal in XML. Invisible characters other than `keep` become escapes."""
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    if cut.isprintable():
        return cut
    return "".join(character if character in keep else _escaped(character) for character in cut)


LONGEST_MESSAGE = 1000
"""Largest number of characters of a message on the terminal."""


def message(text: str) -> str:
    """Return one printable line of at most `LONGEST_MESSAGE` characters. A long text loses its middle: the remedy is at its
    end."""
    text = re.sub(r"\s*[\r\n]\s*", " ", _without_middle(text.strip(), 4 * LONGEST_MESSAGE))
    return _without_middle(printable(text, most=len(text)), LONGEST_MESSAGE)


def _without_middle(text: str, most: int) -> str:
    tail = most // 4
    return text if len(text) <= most else f"{text[: most - tail - 3]} … {text[-tail:]}"


def listed(names: Iterable[object], most: int = 20) -> str:
    """Return the first `most` names, separated by commas."""
    found = [printable(str(name), most=80) for name in names]
    return ", ".join(found[:most]) + (f" and {len(found) - most:,} more" if len(found) > most else "")


def quoted(value: object, most: int = 80) -> str:
    """Return a value as Python writes it, shortened if it is long, deep or large."""
    try:
        return printable(_SHORT.repr(value), most=most)
    except ValueError:  # an integer with more digits than Python prints
        return "a number of thousands of digits"


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 4, 80, 80
