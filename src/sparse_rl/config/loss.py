"""`loss` and `smd`: options of the training objective."""

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from .section import Section

CLIP_RANGES = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""Published (clip_low, clip_high) of each policy loss."""


class SMDConfig(Section):
    """Options of Shadow Mask Distillation (method smd)."""

    model_config = ConfigDict(populate_by_name=True)

    section: ClassVar[str] = "loss.smd"

    lambda_: float = Field(
        0.1, ge=0, alias="lambda", description="Weight of the distillation term; 0 equals on_policy_sparse."
    )
    direction: Literal["dense_to_shadow", "shadow_to_dense", "jsd"] = Field(
        "dense_to_shadow",
        description="KL(dense || sg shadow), KL(shadow || sg dense), or Jensen-Shannon.",
    )
    top_k: int | None = Field(None, ge=1, description="Use only the k most likely tokens; default: all.")


class LossConfig(Section):
    """Policy loss and regularizers."""

    section: ClassVar[str] = "loss"

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = Field("grpo", description="Policy loss.")
    aggregate: Literal["sequence", "token", "constant"] | None = Field(
        None,
        description="Average over sequences, tokens or a constant; default: the loss's own.",
    )
    clip_low: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Clip the ratio at 1 - clip_low; default: the loss's own (0.2 for grpo).",
    )
    clip_high: float | None = Field(
        None,
        ge=0,
        description="Clip the ratio at 1 + clip_high; default: the loss's own (0.2 for grpo).",
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of KL(learner || reference); 0 loads no reference model.")
    kl_estimator: Literal["k2", "k3"] = Field(
        "k3",
        description="KL estimator: k3 (GRPO), or k2 (has the gradient of the KL).",
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    smd: SMDConfig = Field(default_factory=SMDConfig, description="Options of method smd.")

    @property
    def has_other_terms(self) -> bool:
        """True if KL or entropy train all tokens, also those of rows without an advantage."""
        return self.kl_coef > 0 or self.entropy_coef != 0

    @property
    def clips(self) -> tuple[float, float]:
        """Return (clip_low, clip_high). Values that are not set default to those published for the loss."""
        low, high = CLIP_RANGES[self.name]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high
