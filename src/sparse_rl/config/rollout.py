"""`rollout`: the number of rollouts per step, and how they are sampled."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from .sampling import Sampling, check_repetition
from .section import Section

MAX_DRAWS = 4
"""Maximum sampling rounds of a step. `rollout.refill` samples until enough groups have a signal, `rollout.refill_rejected` until
no rollout is rejected."""


class RolloutConfig(Section):
    """Sampling of rollouts in training."""

    section: ClassVar[str] = "rollout"

    prompts_per_step: int = Field(128, ge=1, description="Prompts per step.")
    samples_per_prompt: int = Field(8, description="Rollouts per prompt (group size), at least 2.")
    max_tokens: int = Field(4096, ge=1, description="Maximum response length in tokens.")
    temperature: float = Field(1.0, gt=0, description="Temperature of sampling and of the learner's log-probs.")
    slots: int | Literal["auto"] = Field(
        "auto",
        description="Maximum concurrent rollouts; auto: what fits on the GPU (at most 1024), or 256 on a CPU.",
    )
    repetition: tuple[int, int] | None = Field(
        None,
        description="[period, span]: stop a rollout whose last span tokens repeat with a period of at most period.",
    )

    refill: bool | None = Field(
        None,
        description="Replace groups with equal rewards by other prompts, in up to 4 rounds; default: only for dapo.",
    )

    refill_rejected: bool = Field(
        False,
        description="Replace rejected rollouts by other samples, in up to 4 rounds.",
    )

    @model_validator(mode="after")
    def _check_counts(self) -> "RolloutConfig":
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"rollout.samples_per_prompt = {self.samples_per_prompt} is invalid: advantages compare rollouts of a "
                "prompt, so it must be at least 2. Try 8."
            )
        if self.slots != "auto" and self.slots < 1:
            raise ValueError(f"rollout.slots = {self.slots} is invalid: it must be at least 1, or auto.")
        check_repetition("rollout.repetition", self.repetition)
        return self

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def sampling(self, seed: int) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            repetition=self.repetition,
            seed=seed,
        )
