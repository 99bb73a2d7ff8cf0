"""`reward`: the function that grades responses, and its time limit."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from ..errors import UserError
from .section import Section
from .tasks import TASKS

KIND_REWARDS = {"math": "math_answer", "integer": "integer_answer", "arithmetic": "arithmetic"}
TASK_REWARDS = {task.name: KIND_REWARDS[task.kind] for task in TASKS.values()}
"""Built-in reward function of each task."""

Truncated = Literal["zero", "none", "grade"]
Timeout = Literal["zero", "none"]


class RewardConfig(Section):
    """Grading of responses."""

    section: ClassVar[str] = "reward"

    function: str | None = Field(
        None,
        description="math_answer, integer_answer, last_number, exact, arithmetic, your own (my/rewards.py:graded) or a weighted sum (math_answer + 0.2 * my/rewards.py:brief); default: the task's.",
    )
    truncated: Truncated = Field(
        "zero",
        description="Truncated answers get 0, no verdict, or the function's reward.",
    )
    timeout_s: float = Field(10.0, gt=0, le=3600, description="Time limit per sample, in seconds.")
    timeout: Timeout = Field("zero", description="Samples over timeout_s get 0 or no verdict.")
    workers: int = Field(
        2,
        ge=0,
        description="Grading processes, one sample per call; 0: one call per step in the trainer, without time limit.",
    )

    @field_validator("function", mode="before")
    @classmethod
    def _check_function(cls, function: Any) -> Any:
        if callable(function):
            name = getattr(function, "__name__", type(function).__name__)
            raise ValueError(
                f"reward.function = {name} is a Python object, and a configuration holds names: pass it as "
                "Trainer(config, reward=f)."
            )
        return function

    def function_for(self, source: str) -> str:
        """Return the function that grades problems from `source`: the configured one, or else the task's default."""
        function = self.function or TASK_REWARDS.get(source)
        if function is None:
            raise UserError(
                f"{source} has no default reward function: set --reward.function, such as math_answer, exact or "
                "my_rewards:graded."
            )
        return function
