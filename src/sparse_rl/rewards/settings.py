"""`Reward`: which function grades a response, and how long it may take."""

from typing import ClassVar

from pydantic import Field

from ..errors import UserError
from ..settings import Section

TASK_REWARDS = {"arithmetic": "arithmetic"}
"""The built-in function that grades each task."""


class Reward(Section):
    """Which function grades a response, and how long it may take."""

    section: ClassVar[str] = "reward"

    function: str | None = Field(
        None,
        description="arithmetic, exact, last_number, or yours: my_rewards:graded, my/rewards.py:graded; default: the task's.",
    )
    timeout_s: float = Field(10.0, gt=0, le=3600, description="Seconds after which one sample is left without a verdict.")
    workers: int = Field(2, ge=1, description="Processes that grade at the same time.")

    def function_for(self, source: str) -> str:
        """The function that grades problems from `source`: the one named here, else the task's own."""
        function = self.function or TASK_REWARDS.get(source)
        if function is None:
            raise UserError(
                f"{source} has no reward of its own: name one with --reward.function, such as exact, last_number or "
                "my_rewards:graded."
            )
        return function
