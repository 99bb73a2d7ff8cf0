"""Call one reward or a weighted sum of rewards on a batch: `math_answer + 0.2 * my_rewards.py:brief`."""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError
from ..format import counted
from .find import BUILT_IN, accepts, find

if TYPE_CHECKING:
    from ..data.examples import Example  # which imports pydantic, and every worker would wait for that

PLUS = re.compile(r"\s\+\s")
LISTED = re.compile(r"\[|.*:\w+\s*,")
WEIGHT = re.compile(r"\s*([^*]*?)\s*\*\s*(\S.*)")

ROLLOUT_COLUMNS = ("finish", "completion_ids", "in_thought")
"""Columns produced by the sampler, not by the data. They are passed only to functions that accept them."""
MAX_REWARD = 1e9
"""Maximum absolute reward. A larger reward is an error, so that sums, means and standard deviations stay finite."""


class Term(NamedTuple):
    weight: float
    function: str


class RewardSum(NamedTuple):
    total: float | None
    parts: list[float | None]
    """Unweighted value of each function."""


def terms(spec: str) -> list[Term]:
    """Return the terms of a weighted sum. The default weight is 1."""
    found = []
    if LISTED.match(spec):
        raise UserError(
            f"reward.function = {spec} looks like a list: combine rewards with +, e.g. math_answer + 0.2 * "
            "my_rewards.py:brief."
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
                f"reward.function = {spec} is not a valid weighted sum. Example: math_answer + 0.2 * my_rewards.py:brief."
            )
        found.append(Term(value, function))
    return found


def part_names(spec: str) -> list[str]:
    """Return the metric name of each term: its function name, with a number appended to repeated names."""
    names = [term.function.rpartition(":")[2] for term in terms(spec)]
    return [name if name not in names[:place] else f"{name}_{place + 1}" for place, name in enumerate(names)]


def refuse_without_answers(path: str, example: "Example", function: str) -> None:
    """Raise UserError before sampling starts if a built-in reward is used and the data has no answers."""
    if example.answer is None and (names := [term.function for term in terms(function) if term.function in BUILT_IN]):
        raise UserError(
            f"{path} has no answer column, which reward {names[0]} needs (found {', '.join(example.columns) or 'none'}): "
            "set --data.answer-column, or use another reward."
        )


class Reward:
    """Callable that returns one verdict per completion. Raises if a function returns values other than floats and None."""

    def __init__(self, spec: str | Callable[..., Any]):
        """Find the functions of a weighted sum by name, or wrap one function."""
        if isinstance(spec, str):
            self.weights = [term.weight for term in terms(spec)]
            self.parts = [find(term.function) for term in terms(spec)]
        else:
            self.weights, self.parts = [1.0], [spec]
        self.left_out = [{name for name in ROLLOUT_COLUMNS if not accepts(part, name)} for part in self.parts]
        limits = [part.memory_bytes for part in self.parts if hasattr(part, "memory_bytes")]
        self.memory_bytes = sum(limits) if len(limits) == len(self.parts) else None
        self.is_async = any(map(is_async, self.parts))

    def __call__(
        self, prompts: list, completions: list, columns: dict[str, list], wait: Callable[[Any], Any] | None = None
    ) -> list[RewardSum]:
        """Grade a batch. `wait` awaits a result, by default in the process's event loop."""
        wait = wait or wait_for
        results = [wait(self._call(place, prompts, completions, columns)) for place in range(len(self.parts))]
        return self._sum(results, len(completions))

    async def graded(self, prompts: list, completions: list, columns: dict[str, list]) -> list[RewardSum]:
        """Grade a batch inside a running event loop."""
        results = []
        for place in range(len(self.parts)):
            result = self._call(place, prompts, completions, columns)
            results.append(await result if hasattr(result, "__await__") else result)
        return self._sum(results, len(completions))

    def _call(self, place: int, prompts: list, completions: list, columns: dict[str, list]) -> Any:
        fitting = {name: values for name, values in columns.items() if name not in self.left_out[place]}
        return self.parts[place](prompts=prompts, completions=completions, **fitting)

    def _sum(self, results: list, count: int) -> list[RewardSum]:
        called = [verdicts(result, count) for result in results]
        return [RewardSum(total(list(zip(self.weights, each, strict=True))), list(each)) for each in zip(*called, strict=True)]


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def total(weighted: list[tuple[float, float | None]]) -> float | None:
    """Return the weighted sum of the values that are not None, as in TRL. Return None if all values are None."""
    weighted_values = [weight * value for weight, value in weighted if value is not None]
    return sum(weighted_values) if weighted_values else None


def verdicts(result: Any, count: int) -> list[float | None]:
    """Convert a function's result to floats. Booleans and array scalars are accepted, strings are not."""
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        raise TypeError(f"the reward returned {type(result).__name__}, not a list with one float per completion")
    if len(result) != count:
        raise ValueError(f"the reward returned {counted(len(result), 'value')} for {counted(count, 'completion')}")
    return [verdict(value) for value in result]


def verdict(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise TypeError(f"the reward returned a list of {type(value).__name__}, not of floats")
    return float(value)


def fault_of(verdict: RewardSum) -> str | None:
    """Return an error message if a value of the verdict is not finite or too large, else None."""
    for value in (verdict.total, *verdict.parts):
        if value is not None and not math.isfinite(value):
            return f"the reward returned {value}"
        if value is not None and abs(value) > MAX_REWARD:
            return f"the reward returned {value:g}, beyond \N{PLUS-MINUS SIGN}{MAX_REWARD:g}"
    return None


@functools.cache
def event_loop() -> Any:
    """Return the event loop of this process.

    The process uses a single loop, because HTTP clients opened by a reward module are bound to the loop they were first used
    in.
    """
    import asyncio  # imported here: most rewards are not async, and the import is slow

    return asyncio.Runner()


def wait_for(result: Any) -> Any:
    """Return the result, awaited if it is awaitable."""
    return event_loop().run(awaited(result)) if hasattr(result, "__await__") else result


async def awaited(result: Any) -> Any:
    return await result
