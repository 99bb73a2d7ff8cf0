"""Samples of one grading: requests to the reward, outcomes that have arrived, and verdicts."""

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Graded:
    """Verdicts of a batch, None for samples without a verdict. Failed samples are counted by reason."""

    values: list[float | None]
    no_verdict: int
    """Samples for which the function returned None."""
    timeouts: int
    errors: int
    """Samples for which the function raised, ended its process, or did not return one finite number of absolute value at most
    `MAX_REWARD`."""
    first_error: str | None
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Value of each function of a weighted sum, None for samples without a verdict. Empty for a single function."""
    truncated: int = 0
    """Samples that were truncated and therefore not passed to the function."""
    strays: int = 0
    """Lines received from workers that matched no request."""

    def reordered(self, order: Sequence[int]) -> "Graded":
        """Return the verdicts in another order: place i holds the verdict of sample `order[i]`."""
        parts = {name: [values[sample] for sample in order] for name, values in self.parts.items()}
        return replace(self, values=[self.values[sample] for sample in order], parts=parts)


class SampleBatch:
    """Samples to grade and their outcomes. An outcome is a value, an error or a timeout."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.outcomes: list[dict[str, Any]] = []
        self.waiting: deque[int] = deque()
        self.alone: deque[int] = deque()
        """Samples to grade again, each alone in a worker, because several samples were in flight when their worker failed."""

    def add(self, requests: list[bytes], truncated: list[bool]) -> None:
        first = len(self.requests)
        self.requests += requests
        self.outcomes += [{} for _ in requests]
        self.waiting.extend(first + sample for sample, each in enumerate(truncated) if not each)

    @property
    def unassigned(self) -> bool:
        return bool(self.waiting or self.alone)

    def record(self, samples: list[int], outcome: dict[str, Any], *, is_certain: bool = True) -> None:
        """Record the outcome of these samples. If it is not certain, grade each of them again, alone."""
        if not is_certain:
            self.alone.extend(samples)
            return
        for sample in samples:
            self.outcomes[sample] = outcome

    def fail_rest(self, why: str | None) -> None:
        self.record([*self.waiting, *self.alone], {"error": why})
        self.waiting.clear()
        self.alone.clear()


def packed_requests(prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, list[Any]]) -> list[bytes]:
    """Return one pickled request per sample: its prompt, its completion and its row of the columns."""
    assert {len(completions), *map(len, columns.values())} <= {len(prompts)}, (
        "prompts, completions and columns differ in length"
    )
    packed = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        packed.append(pickle.dumps((prompt, completion, {name: values[index] for name, values in columns.items()})))
    return packed
