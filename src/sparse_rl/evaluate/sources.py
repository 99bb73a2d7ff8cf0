"""Load the problems of a benchmark: a task, a file of the user's own, or data on the hub."""

from ..config import TASKS, DataConfig
from ..data.examples import LoadedExamples, load

OWN_MAX_TOKENS = 4096
"""Default of --max-tokens for the user's own problems."""
GENERATED_PROBLEMS = 256
"""Default of --problems for a task that generates its problems."""


def evaluated_as(source: str) -> tuple[str | None, int, int]:
    """Return (title, most response tokens, samples per problem) as the papers evaluate a task; no title for other data."""
    task = TASKS.get(source)
    return (task.title, task.max_tokens, task.samples) if task else (None, OWN_MAX_TOKENS, 1)


def loaded(source: str, data: DataConfig, problems: int | None) -> LoadedExamples:
    """Return the first `problems` held-out problems, or all."""
    found = load(source, "test", n=problems or GENERATED_PROBLEMS, seed=0, **data.reading)
    return LoadedExamples(found.examples[:problems], found.skipped, found.note)
