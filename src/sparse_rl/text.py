"""Make external text safe to display, e.g. text from a model, a file or a folder name."""

import re
import reprlib
import unicodedata
from collections.abc import Collection, Iterable

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories that are escaped: control, format (e.g. right-to-left marks), surrogate, private-use and unassigned
characters, line and paragraph separators."""


def printable(text: str, most: int = 400, keep: str = "") -> str:
    """Return the text as one line, legal in XML. Invisible characters that are not in `keep` are escaped."""
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    if cut.isprintable():
        return cut
    return "".join(character if character in keep else _escaped(character) for character in cut)


def is_unicode(text: str) -> bool:
    """Return whether the text can be encoded. Arguments of a command may have bytes that are not UTF-8, as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


LONGEST_MESSAGE = 1000
"""Maximum characters of a message on the terminal."""


def message(text: str) -> str:
    """Return the text as one printable line of at most `LONGEST_MESSAGE` characters.

    A longer text is shortened in the middle, because the fix is stated at the end.
    """
    text = re.sub(r"\s*[\r\n]\s*", " ", _without_middle(text.strip(), 4 * LONGEST_MESSAGE))
    return _without_middle(printable(text, most=len(text)), LONGEST_MESSAGE)


def _without_middle(text: str, most: int) -> str:
    tail = most // 4
    return text if len(text) <= most else f"{text[: most - tail - 3]} … {text[-tail:]}"


def listed(names: Iterable[object], most: int = 20) -> str:
    """Return the first `most` names separated by commas, and the number of the others."""
    found = [printable(str(name), most=80) for name in names]
    return ", ".join(found[:most]) + (f" and {len(found) - most:,} more" if len(found) > most else "")


def did_you_mean(name: str, known: Collection[str], otherwise: str = "") -> str:
    """Return a question with the known name that is most similar, or `otherwise` if none is. The default lists all names."""
    import difflib  # imported here, because every reward worker imports this module

    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise or f"use one of {', '.join(known) or 'none'}."


def quoted(value: object, most: int = 80) -> str:
    """Return the repr of a value, shortened if the value is long or deeply nested."""
    try:
        return printable(_SHORT.repr(value), most=most)
    except ValueError:  # the integer has more digits than Python converts to text
        return "a number with thousands of digits"


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 4, 80, 80
