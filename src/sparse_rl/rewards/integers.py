"""Reward for tasks with integer answers (AIME, AMC, GSM8K). It compares digits and evaluates only sums."""

import re
from collections import deque
from decimal import Decimal
from typing import Any

from .answers import ANNOUNCED, VisibleText, boxed, integer, tidy
from .equations import values_in
from .functions import NUMBER, number_in, visible_texts

__all__ = ["integer_answer"]

PART_OF_MORE = re.compile(r"\s*(?:_|\^(?!\s*\{?\s*\\circ)|/\s*\d)")
"""Text after a number which shows that the number is part of a power, a subscripted name or a fraction."""
TERM = re.compile(r"[-+]? *[0-9]{1,18}")
SUM = re.compile(rf"{TERM.pattern}(?: *[-+] *[0-9]{{1,18}})+")


def integer_answer(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    r"""Return 1 for each completion whose last `\boxed{…}` holds the answer's integer, else 0.

    Without a box, the number after "answer is" or #### counts; without an announcement, the last number counts. Dollar signs,
    thousands separators, `.0`, a unit and a name, as in `m + n = 25`, are allowed. A sum, a power or two numbers are not. A
    truncated completion needs a box. The verdict is None if the answer is not an integer.
    """
    verdicts: list[float | None] = []
    for visible, right in zip(visible_texts(completions, columns), answer, strict=True):
        wanted = integer(right)
        verdicts.append(None if wanted is None else float(integer_in(visible) == wanted))
    return verdicts


def integer_in(visible: VisibleText) -> str | None:
    content = boxed(visible.text)
    if content is not None:
        return common_integer(values_in(content))
    return unboxed(tidy(visible.text)) if visible.complete else None


def common_integer(sides: list[str]) -> str | None:
    """Return the integer that all sides equal, or None. A sum counts only next to its result, as in `m + n = 12 + 13 = 25`."""
    integers = [integer(side) for side in sides]
    values = {value or total(side) for value, side in zip(integers, sides, strict=True)}
    return values.pop() if len(values) == 1 and any(integers) else None


def total(side: str) -> str | None:
    return str(sum(int(term.replace(" ", "")) for term in TERM.findall(side))) if SUM.fullmatch(side) else None


def unboxed(text: str) -> str | None:
    """Return the number after the last "answer is" or ####, or else the last number in the text."""
    announcements = list(ANNOUNCED.finditer(text))
    number = NUMBER.search(text, announcements[-1].end()) if announcements else None
    if number is None:
        number = next(iter(deque(NUMBER.finditer(text), maxlen=1)), None)  # the last match
    if number is None or not stands_alone(text, number):
        return None
    value = number_in(number.group())
    return as_digits(value) if value is not None else None


def stands_alone(text: str, number: re.Match[str]) -> bool:
    r"""Return whether the match is a complete number. The 4 in `\frac{3}{4}` and the 3 in `2^3` or `z_3` are not."""
    return text[number.start() - 1 : number.start()] not in ("{", "^", "_", "/") and not PART_OF_MORE.match(text, number.end())


def as_digits(value: Decimal) -> str | None:
    """Return the digits of an integer. Return None if the value is not an integer or its exponent exceeds 1000."""
    if abs(value.adjusted()) > 1000 or value != value.to_integral_value():
        return None
    return integer(f"{value:f}")
