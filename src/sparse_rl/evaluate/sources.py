"""From a benchmark's name to its problems: a task, a file of the user's own, or data on the hub."""

from ..config import TASKS, DataConfig
from ..data.examples import Loaded, load

OWN_MAX_TOKENS = 4096
"""Of responses to problems of the user's own, where --max-tokens does not say."""
MADE_UP = 256
"""Problems of a task that makes its own, where --problems does not say."""


def evaluated_as(source: str) -> tuple[str | None, int, int]:
    """(title, most response tokens, samples of each problem), as the papers evaluate a task; no title for other data."""
    task = TASKS.get(source)
    return (task.title, task.max_tokens, task.samples) if task else (None, OWN_MAX_TOKENS, 1)


def loaded(source: str, data: DataConfig, problems: int | None) -> Loaded:
    """The first `problems` held-out ones, or all."""
    found = load(source, "test", n=problems or MADE_UP, seed=0, **data.reading)
    return Loaded(found.examples[:problems], found.skipped, found.note)
