"""`alerts`: limits on the metrics of a run."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from .section import Section

Share = Annotated[float, Field(ge=0, le=1)] | Literal["none"]


class AlertsConfig(Section):
    """When a run asks for you: limits on its metrics, of which none turns the alert off."""

    section: ClassVar[str] = "alerts"

    steps: int = Field(
        3, ge=1, description="Steps in a row beyond a limit before its alert begins, and within it before it ends."
    )
    reward: Share = Field(0.5, description="reward/mean below its best by more than this share of it and more than chance.")
    entropy: Share = Field(0.1, description="policy/entropy below this share of what it was at the first step.")
    repetition: Share = Field(0.1, description="response/repetition above this.")
    truncated: Share = Field(
        0.2,
        description="response/truncated above the first step's by more than this where reward/mean has lost half of its best; elsewhere by more than half.",
    )
    length: Share = Field(0.33, description="response/mean_tokens below this share of what it was at the first step.")
    grad_norm: Annotated[float, Field(gt=1)] | Literal["none"] = Field(
        2.5, description="policy/grad_norm above so many times the median of its first ten steps."
    )
    xi_p05: Share = Field(0.6, description="sparse/xi_p05 below this.")
    rejected: Share = Field(0.4, description="sparse/rejection_rate or sparse/wasted_tokens above this.")
    zero_std_groups: Share = Field(0.9, description="reward/zero_std_groups above this.")
    no_verdict: Share = Field(0.1, description="Rollouts without a verdict (None, timeout or error) / rollouts above this.")

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_a_word(cls, value: Any) -> Any:
        """TOML has no null: what is turned off must come back from config.toml."""
        return "none" if value is None or value in ("null", "None") else value
