"""The reward of tasks whose answers are integers (AIME, AMC, GSM8K): compared figure by figure, nothing is evaluated."""

from decimal import Decimal
from typing import Any

from .answers import ANNOUNCED, boxed, integer
from .functions import NUMBER, number_in, text_of

__all__ = ["integer_answer"]


def integer_answer(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    r"""The last `\boxed{…}` is the answer's integer; without a box the number announced by "answer is" or ####, else the last.

    Dollars, commas between thousands, `.0` and a unit are forgiven; an equation, a sum, a power or two numbers are not. No
    verdict where the data's answer is no integer.
    """
    verdicts: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        wanted = integer(right)
        verdicts.append(None if wanted is None else float(integer_in(text_of(completion)) == wanted))
    return verdicts


def integer_in(text: str) -> str | None:
    content = boxed(text)
    if content is not None:
        return integer(content)
    announcements = list(ANNOUNCED.finditer(text))
    if announcements and (number := NUMBER.search(text, announcements[-1].end())):
        text = number.group()
    value = number_in(text)
    return as_digits(value) if value is not None else None


def as_digits(value: Decimal) -> str | None:
    """An integer's figures, unless it is written with an exponent too large to write them."""
    if abs(value.adjusted()) > 1000 or value != value.to_integral_value():
        return None
    return integer(f"{value:f}")
