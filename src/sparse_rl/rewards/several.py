"""One reward or a weighted sum of several, called on a batch: `math_answer + 0.2 * my_rewards.py:brief`."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..data.examples import Example
from ..errors import UserError
from .find import BUILT_IN, find

PLUS = re.compile(r"\s\+\s")
LISTED = re.compile(r"\[|.*:\w+\s*,")
WEIGHT = re.compile(r"\s*([^*]*?)\s*\*\s*(\S.*)")

Reward = Callable[..., list["Verdict"]]


class Term(NamedTuple):
    weight: float
    function: str


class Verdict(NamedTuple):
    total: float | None
    parts: list[float | None]
    """Of each function, unweighted."""


def terms(spec: str) -> list[Term]:
    """The parts of a sum; a weight is 1 where none is named."""
    found = []
    if LISTED.match(spec):
        raise UserError(
            f"reward.function = {spec} is no sum of rewards: write several like math_answer + 0.2 * my_rewards.py:brief."
        )
    for part in PLUS.split(spec):
        weight, function = "1", part.strip()
        if match := WEIGHT.fullmatch(part):
            weight, function = match.groups()
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not function:
            raise UserError(
                f"reward.function = {spec} is no sum of rewards: write it like math_answer + 0.2 * my_rewards.py:brief."
            )
        found.append(Term(value, function))
    return found


def part_names(spec: str) -> list[str]:
    """What the parts of a sum are called in metrics: by their function, numbered where two have one name."""
    names = [term.function.rpartition(":")[2] for term in terms(spec)]
    return [name if name not in names[:place] else f"{name}_{place + 1}" for place, name in enumerate(names)]


def refuse_without_answers(path: str, example: Example, function: str) -> None:
    """Before hours of sampling that none of our own rewards could grade."""
    if example.answer is None and (needy := [term.function for term in terms(function) if term.function in BUILT_IN]):
        raise UserError(
            f"{path} has no answer that {needy[0]} could grade by, beside the problem only "
            f"{', '.join(example.columns) or 'nothing'}: name its column with --data.answer-column, or give another reward."
        )


def reward_of(spec: str) -> Reward:
    """A function from a batch to a verdict per completion, which raises where a part returns anything but floats and None; NaN
    and infinity come back as they are."""
    parts = [(term.weight, find(term.function)) for term in terms(spec)]

    def reward(prompts: list, completions: list, **columns: Any) -> list[Verdict]:
        called = [returned(part, prompts, completions, columns) for _, part in parts]
        weights = [weight for weight, _ in parts]
        return [Verdict(total(list(zip(weights, each, strict=True))), list(each)) for each in zip(*called, strict=True)]

    limits = [part.memory_bytes for _, part in parts if hasattr(part, "memory_bytes")]
    reward.memory_bytes = sum(limits) if len(limits) == len(parts) else None  # type: ignore[attr-defined]
    return reward


def total(weighted: list[tuple[float, float | None]]) -> float | None:
    """As in TRL, a part without a verdict is left out of the sum; without any there is none."""
    given = [weight * value for weight, value in weighted if value is not None]
    return sum(given) if given else None


def returned(function: Callable[..., Any], prompts: list, completions: list, columns: dict[str, list]) -> list[float | None]:
    result = function(prompts=prompts, completions=completions, **columns)
    if hasattr(result, "__await__"):
        result = event_loop().run(finish(result))
    return verdicts(result, len(completions))


def verdicts(result: Any, count: int) -> list[float | None]:
    """The floats in what a function returned; booleans and array scalars are numbers, texts are not."""
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        raise TypeError(f"the reward returned {type(result).__name__}, not a list with one float per completion")
    if len(result) != count:
        raise ValueError(f"the reward returned {len(result)} values for {count} completion{'s' if count > 1 else ''}")
    return [verdict(value) for value in result]


def verdict(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise TypeError(f"the reward returned a list of {type(value).__name__}, not of floats")
    return float(value)


def refuse_if_not_finite(value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"the reward returned {value}")


@functools.cache
def event_loop() -> Any:
    """One loop for the life of the process, because clients that a module opens belong to the loop they were used in."""
    import asyncio  # most rewards are not async, and it takes long to import

    return asyncio.Runner()


async def finish(result: Any) -> Any:
    return await result
