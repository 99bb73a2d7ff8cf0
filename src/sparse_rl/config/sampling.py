"""`sampling`: token sampling and stopping rules of rollouts."""

from typing import ClassVar

from pydantic import Field, model_validator

from .section import Section


def check_repetition(option: str, value: tuple[int, int] | None) -> None:
    """Raise ValueError if no response could match this (period, span)."""
    if value is None:
        return
    period, span = value
    if period < 1 or span <= period:
        raise ValueError(
            f"{option} = ({period}, {span}) is invalid: period must be at least 1, and span must exceed period. Try "
            f"({max(period, 1)}, {8 * max(period, 1)})."
        )


class Sampling(Section):
    """Token sampling and stopping rules of rollouts."""

    section: ClassVar[str] = "sampling"

    max_tokens: int = Field(
        1024, ge=1, description="Maximum response length in tokens; a rollout that reaches it ends with finish = length."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy, with log-probs at temperature 1.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the smallest set of tokens with this total probability (top-p); 1 disables it.",
    )
    top_k: int = Field(0, ge=0, description="Sample from this many most likely tokens (top-k); 0 disables it.")
    seed: int = Field(0, ge=0, lt=2**63, description="Base seed; the seed of every rollout derives from it.")
    stop: tuple[int, ...] | None = Field(
        None, description="Token ids that end a rollout, such as [2]; default: the model's EOS ids; [] disables stop tokens."
    )
    repetition: tuple[int, int] | None = Field(
        None,
        description="[period, span], such as [64, 512]: stop a rollout whose last span tokens repeat with a period of at most period.",
    )

    @model_validator(mode="after")
    def _check_repetition(self) -> "Sampling":
        check_repetition("sampling.repetition", self.repetition)
        return self

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the recorded log-probs."""
        return self.temperature or 1.0
