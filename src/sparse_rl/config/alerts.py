"""`alerts`: limits on the metrics of a run."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from .section import Section

Share = Annotated[float, Field(ge=0, le=1)] | Literal["none"]

XI_P05, XI_P05_UNCORRECTED = 0.6, 0.86
"""Limits of `alerts.xi_p05 = auto`, with and without a correction (experiments/evidence/RESULTS.md, section H)."""


class AlertsConfig(Section):
    """Limits of the alerts. `none` disables an alert."""

    section: ClassVar[str] = "alerts"

    steps: int = Field(
        3, ge=1, description="Consecutive steps beyond a limit that start an alert; held_out needs one evaluation."
    )
    reward: Share = Field(0.5, description="Largest drop of reward/mean, as a fraction of its best value.")
    held_out: Share = Field(
        0.2,
        description="Largest drop of a held-out score (dense cache), as a fraction of its best value; overlapping intervals do not count.",
    )
    entropy: Share = Field(0.1, description="Smallest policy/entropy, relative to step 1.")
    repetition: Share = Field(0.1, description="Largest response/repetition.")
    truncated: Share = Field(
        0.2,
        description="Largest rise of response/truncated since step 1 if reward/mean has halved; otherwise at least 0.5.",
    )
    length: Share = Field(0.33, description="Smallest response/mean_tokens, relative to step 1.")
    grad_norm: Annotated[float, Field(gt=1)] | Literal["none"] = Field(
        2.5, description="Largest policy/grad_norm, relative to its median over the first ten steps."
    )
    xi_p05: Share | Literal["auto"] = Field(
        "auto",
        description=f"Smallest sparse/xi_p05; auto: {XI_P05_UNCORRECTED:g} if nothing corrects the mismatch, else {XI_P05:g}. With "
        f"kv.budget = auto, also the target of sparse/xi_p05_long, where auto is {XI_P05:g}.",
    )
    rejected: Share = Field(
        0.4,
        description="Largest sparse/rejection_rate or sparse/wasted_tokens. Also starts if the rate is 0.15 above its median over the first ten steps.",
    )
    zero_std_groups: Share = Field(0.9, description="Largest reward/zero_std_groups.")
    no_verdict: Share = Field(0.1, description="Largest fraction of rollouts without a verdict.")

    @field_validator("*", mode="before")
    @classmethod
    def _null_as_word(cls, value: Any) -> Any:
        """Convert None to the string `none`, because TOML has no null and config.toml must store disabled alerts."""
        return "none" if value is None or value in ("null", "None") else value

    def resolved(self, *, corrected: bool) -> Self:
        """Return the limits with a number in place of `xi_p05 = auto`. `corrected` is false if nothing corrects the mismatch."""
        limit = XI_P05 if corrected else XI_P05_UNCORRECTED
        return self.model_copy(update={"xi_p05": limit}) if self.xi_p05 == "auto" else self
