"""Text that others wrote, made safe to show: a model's, a folder's name, a file's."""

import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's control, format (right-to-left marks among them), surrogate, private and unassigned characters, and odd line ends."""


def printable(text: str, most: int = 400, keep: str = "") -> str:
    """One line that drives no terminal and is legal in XML: what would not be seen is written as an escape, but for `keep`."""
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    return "".join(character if character in keep else _escaped(character) for character in cut)


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
