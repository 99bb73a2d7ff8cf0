"""Reward of tasks whose answers are integers (AIME, AMC, GSM8K). Figures are compared, and nothing but sums is evaluated."""

import re
from collections import deque
from decimal import Decimal
from typing import Any

from .answers import ANNOUNCED, VisibleText, boxed, integer, tidy
from .equations import values_in
from .functions import NUMBER, number_in, visible_texts

__all__ = ["integer_answer"]

PART_OF_MORE = re.compile(r"\s*(?:_|\^(?!\s*\{?\s*\\circ)|/\s*\d)")
"""Text after a number that is only the start of a power, a name or a fraction."""
TERM = re.compile(r"[-+]? *[0-9]{1,18}")
SUM = re.compile(rf"{TERM.pattern}(?: *[-+] *[0-9]{{1,18}})+")


def integer_answer(
    prompts: list,
    completions: list,
    answer: list[str],
    finish: list[str] | None = None,
    in_thought: list[bool] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""Grade each completion: 1 if the last `\boxed{…}` is the answer's integer, else 0.

    Without a box, the number announced by "answer is" or #### counts, else the last one. Dollars, commas between thousands,
    `.0`, a unit and a name, as in `m + n = 25`, are allowed. A sum, a power or two numbers are not. A text that was cut off
    needs a box. No verdict if the data's answer is no integer.
    """
    verdicts: list[float | None] = []
    for visible, right in zip(visible_texts(completions, finish, in_thought), answer, strict=True):
        wanted = integer(right)
        verdicts.append(None if wanted is None else float(integer_in(visible) == wanted))
    return verdicts


def integer_in(visible: VisibleText) -> str | None:
    content = boxed(visible.text)
    if content is not None:
        return common_integer(values_in(content))
    return unboxed(tidy(visible.text)) if visible.complete else None


def common_integer(sides: list[str]) -> str | None:
    """Return the integer that all sides equal, or None. A sum counts only beside its result: `m + n = 12 + 13 = 25`."""
    integers = [integer(side) for side in sides]
    values = {value or total(side) for value, side in zip(integers, sides, strict=True)}
    return values.pop() if len(values) == 1 and any(integers) else None


def total(side: str) -> str | None:
    return str(sum(int(term.replace(" ", "")) for term in TERM.findall(side))) if SUM.fullmatch(side) else None


def unboxed(text: str) -> str | None:
    """Return the number that a text announces, else its last number."""
    announcements = list(ANNOUNCED.finditer(text))
    number = NUMBER.search(text, announcements[-1].end()) if announcements else None
    if number is None:
        number = next(iter(deque(NUMBER.finditer(text), maxlen=1)), None)  # the last
    if number is None or not stands_alone(text, number):
        return None
    value = number_in(number.group())
    return as_digits(value) if value is not None else None


def stands_alone(text: str, number: re.Match[str]) -> bool:
    r"""Return whether the match is a whole number of its own. The 4 of `\frac{3}{4}` and the 3 of `2^3` or `z_3` are not."""
    return text[number.start() - 1 : number.start()] not in ("{", "^", "_", "/") and not PART_OF_MORE.match(text, number.end())


def as_digits(value: Decimal) -> str | None:
    """Return the digits of an integer, or None if it is no integer or its exponent is too large to write them."""
    if abs(value.adjusted()) > 1000 or value != value.to_integral_value():
        return None
    return integer(f"{value:f}")
