"""Built-in rewards, in TRL's convention: one float per completion, or None for no verdict.

A completion is a string, or a list of messages if the prompt is one. `answer` is the data column of that name. `finish` states
how each completion ended (stop, length or repetition). `in_thought` states whether the prompt opened a `<think>` block.
Without these columns, every completion counts as finished.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from ..data.arithmetic import grade
from .answers import VisibleText, visible_text

__all__ = ["arithmetic", "exact", "last_number"]  # names that a user can select

# A minus sign after a word, a digit or a bracket is subtraction, not a sign. A comma either groups three digits or separates
# numbers.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\N{MINUS SIGN}])?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
)


def arithmetic(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """Grade the embedded arithmetic task: 1 if the text after the last `=` is exactly the answer, else 0."""
    return [grade(text_of(completion), right) for completion, right in zip(completions, answer, strict=True)]


def exact(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """Return 1 for each completion that equals the answer, ignoring surrounding whitespace, else 0."""
    return [float(text_of(completion).strip() == right.strip()) for completion, right in zip(completions, answer, strict=True)]


def last_number(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """Return 1 for each completion whose last number equals the number in the answer, else 0.

    Numbers are compared by value: 1,234.50 equals 1234.5. A truncated completion gets 0. The verdict is None if the answer has
    no number.
    """
    verdicts: list[float | None] = []
    for visible, right in zip(visible_texts(completions, columns), answer, strict=True):
        wanted = number_in(right)
        verdicts.append(None if wanted is None else float(visible.complete and number_in(visible.text) == wanted))
    return verdicts


def visible_texts(completions: list, columns: Mapping[str, list]) -> list[VisibleText]:
    """Return the text of each completion outside its `<think>` blocks, by the columns `finish` and `in_thought`, if present."""
    ends = columns.get("finish") or ["stop"] * len(completions)
    starts = columns.get("in_thought") or [False] * len(completions)
    return [visible_text(text_of(each), end, start) for each, end, start in zip(completions, ends, starts, strict=True)]


def text_of(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def number_in(text: str) -> Decimal | None:
    """Return the last number in a text as an exact Decimal, or None. 0.1 equals 0.10 but not 0.1000001."""
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("\N{MINUS SIGN}", "-")) if found else None
    except InvalidOperation:  # the exponent is out of Decimal's range
        return None
