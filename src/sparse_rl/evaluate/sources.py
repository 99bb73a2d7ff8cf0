"""Load the problems of a benchmark from a built-in task, a user's file or a hub dataset."""

from ..config import TASKS, DataConfig
from ..data.examples import LoadedExamples, load

OWN_MAX_TOKENS = 4096
"""Default of --max-tokens for data that is not a built-in task."""
GENERATED_PROBLEMS = 256
"""Default of --problems for a task that generates problems."""


def evaluated_as(source: str) -> tuple[str | None, int, int]:
    """Return (title, max response tokens, samples per problem), following published evaluations. Other data has no title."""
    task = TASKS.get(source)
    return (task.title, task.max_tokens, task.samples) if task else (None, OWN_MAX_TOKENS, 1)


def loaded(source: str, data: DataConfig, problems: int | None) -> LoadedExamples:
    """Return the first `problems` held-out problems, or all of them if `problems` is None."""
    found = load(source, "test", n=problems or GENERATED_PROBLEMS, seed=0, **data.reading)
    return LoadedExamples(found.examples[:problems], found.skipped, found.note)
