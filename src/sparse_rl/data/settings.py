"""`Data`: where the problems come from and how they become prompts."""

from typing import ClassVar

from pydantic import Field, model_validator

from ..settings import Section
from .examples import PLACE, TASKS


class Data(Section):
    """Where the problems come from and how they become prompts."""

    section: ClassVar[str] = "data"

    train: str = Field("arithmetic", min_length=1, description=f"A task ({', '.join(TASKS)}) or the path of a .jsonl file.")
    test: str | None = Field(
        None, min_length=1, description="The same for evaluation; by default the task's held-out problems."
    )
    template: str = Field(PLACE, description=f"Text around the problem, which stands where this says {PLACE}.")
    raw: bool = Field(False, description="Encode prompts as they are, without the chat template.")

    @model_validator(mode="after")
    def _template_shows_the_problem(self) -> "Data":
        if PLACE not in self.template:
            raise ValueError(
                f"data.template = {self.template!r} leaves the problem out: write {PLACE} where it belongs, "
                f"as in '{PLACE} Think step by step.'"
            )
        return self

    @property
    def held_out(self) -> str | None:
        """What to evaluate on: a task holds problems out by itself, a file of training problems does not."""
        return self.test or (self.train if self.train in TASKS else None)
