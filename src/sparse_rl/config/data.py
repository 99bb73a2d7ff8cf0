"""`data`: the source of the problems, and how they are turned into prompts."""

from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from .section import Section
from .tasks import TASKS

PLACEHOLDER = "{prompt}"
"""Placeholder for the problem in `data.template`."""

RESERVED_KWARGS = {
    "conversation", "messages", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors",
    "padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask", "chat_template",
}  # fmt: skip
"""Arguments of apply_chat_template that are not template variables."""


class DataConfig(Section):
    """Problems, and how they are turned into prompts."""

    section: ClassVar[str] = "data"

    train: str = Field(
        "arithmetic",
        min_length=1,
        description=f"Task ({', '.join(name for name, task in TASKS.items() if task.train)}), file (.jsonl, .parquet, .csv) or hub "
        "dataset (owner/name:configuration:split).",
    )
    test: str | tuple[str, ...] | None = Field(
        None,
        description="Held-out data: as data.train, a benchmark "
        f"({', '.join(name for name, task in TASKS.items() if task.test and not task.train)}), or a list; default: the task's.",
    )
    dir: str | None = Field(None, min_length=1, description="Folder with the tasks' data files; default: the hub.")
    prompt_column: str | None = Field(
        None, min_length=1, description="Column of the problem; default: prompt, problem or question."
    )
    answer_column: str | None = Field(None, min_length=1, description="Column of the answer; default: answer.")
    template: str | None = Field(
        None,
        description=f"Prompt template with the placeholder {PLACEHOLDER}; default: the problem, then the task's instruction.",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Maximum prompt length; longer training problems are skipped, test problems never."
    )
    raw: bool = Field(False, description="Encode prompts verbatim, without the chat template.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for the chat template, such as enable_thinking = false for Qwen3."
    )

    @field_validator("test")
    @classmethod
    def _check_test(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and not (value and all(value)):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"data.test = {shown!r} names no held-out set: name a task or a file, or remove the option.")
        return value[0] if isinstance(value, tuple) and len(value) == 1 else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_chat_template_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(RESERVED_KWARGS & set(value)):
            raise ValueError(f"data.chat_template_kwargs sets {taken[0]}, which sparse-rl sets itself: remove it.")
        return value

    @model_validator(mode="after")
    def _check_template(self) -> "DataConfig":
        if self.template is not None and PLACEHOLDER not in self.template:
            raise ValueError(
                f"data.template = {self.template!r} has no placeholder for the problem: add {PLACEHOLDER}, as in "
                f"'{PLACEHOLDER} Think step by step.'"
            )
        return self

    @property
    def held_out(self) -> tuple[str, ...]:
        """Sources of the held-out sets. Some tasks define a held-out split; a file of training problems does not."""
        if self.test is not None:
            return (self.test,) if isinstance(self.test, str) else self.test
        task = TASKS.get(self.train)
        return (self.train,) if task and task.test else ()

    @property
    def reading(self) -> dict[str, str | None]:
        """Arguments of `load` besides source, split, number and seed."""
        return {"dir": self.dir, "prompt_column": self.prompt_column, "answer_column": self.answer_column}
