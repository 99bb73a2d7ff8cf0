"""The built-in rewards, in TRL's convention: one float per completion, None for no verdict.

A completion is a text, or a list of messages if the prompt is one. `answer` is the data's column of that name. `finish` says
how each completion ended (stop, length, repetition) and `in_thought` whether its prompt opened a thought. Without these
columns all texts count as finished.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from ..data.arithmetic import grade
from .answers import VisibleText, visible_text

__all__ = ["arithmetic", "exact", "last_number"]  # the names a user may give

# a minus after a word, a digit or a bracket subtracts and is no sign; a comma groups three digits or separates
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\N{MINUS SIGN}])?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
)


def arithmetic(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """Grade completions of the embedded task: 1 if the text after the last `=` is exactly the answer, else 0."""
    return [grade(text_of(completion), right) for completion, right in zip(completions, answer, strict=True)]


def exact(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """Grade each completion: 1 if the whole text is the answer, except for space around it, else 0."""
    return [float(text_of(completion).strip() == right.strip()) for completion, right in zip(completions, answer, strict=True)]


def last_number(
    prompts: list,
    completions: list,
    answer: list[str],
    finish: list[str] | None = None,
    in_thought: list[bool] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Grade each completion: 1 if the last number in the text equals the answer's, else 0.

    The spelling does not matter: 1,234.50 is 1234.5. A text that was cut off is wrong. No verdict if the data's answer has no
    number.
    """
    verdicts: list[float | None] = []
    for visible, right in zip(visible_texts(completions, finish, in_thought), answer, strict=True):
        wanted = number_in(right)
        verdicts.append(None if wanted is None else float(visible.complete and number_in(visible.text) == wanted))
    return verdicts


def visible_texts(completions: list, finish: list[str] | None, in_thought: list[bool] | None) -> list[VisibleText]:
    """Return the text of each completion outside of its thoughts."""
    ends, starts = finish or ["stop"] * len(completions), in_thought or [False] * len(completions)
    return [visible_text(text_of(each), end, start) for each, end, start in zip(completions, ends, starts, strict=True)]


def text_of(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def number_in(text: str) -> Decimal | None:
    """Return the last number in a text, exact: 0.1 equals 0.10 and nothing else."""
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("\N{MINUS SIGN}", "-")) if found else None
    except InvalidOperation:  # an exponent beyond any number
        return None
