"""The built-in rewards, in TRL's convention: one float per completion, None where there is no verdict.

A completion is a text, or a list of messages where the prompt is one. `answer` is the data's column of that name.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from ..data.arithmetic import grade

__all__ = ["arithmetic", "exact", "last_number"]  # the names a user may give

# a minus after a word, a digit or a bracket subtracts and belongs to no number; a comma groups three digits or separates
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\N{MINUS SIGN}])?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
)


def arithmetic(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """The embedded task: what follows the last `=` is exactly the answer."""
    return [grade(text_of(completion), right) for completion, right in zip(completions, answer, strict=True)]


def exact(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """The whole text is the answer, but for space around it."""
    return [float(text_of(completion).strip() == right.strip()) for completion, right in zip(completions, answer, strict=True)]


def last_number(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """The last number in the text is the answer's, however spelt: 1,234.50 is 1234.5. An answer without one: no verdict."""
    verdicts: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        wanted = number_in(right)
        verdicts.append(None if wanted is None else float(number_in(text_of(completion)) == wanted))
    return verdicts


def text_of(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def number_in(text: str) -> Decimal | None:
    """The last number in a text; exact, so that 0.1 is 0.10 and nothing else."""
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("\N{MINUS SIGN}", "-")) if found else None
    except InvalidOperation:  # an exponent beyond any number
        return None
