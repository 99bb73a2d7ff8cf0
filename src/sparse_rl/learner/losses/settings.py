"""`Loss` and `SMD`: the options of what is minimised."""

import re
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from ...settings import Section
from . import PolicyLoss, get
from .regularizers import Estimator


class SMD(Section):
    """How the dense policy is pulled to its sparse view (Shadow Mask Distillation; method smd)."""

    model_config = ConfigDict(populate_by_name=True)

    section: ClassVar[str] = "loss.smd"

    lambda_: float = Field(0.1, ge=0, alias="lambda", description="Weight of the distillation term; 0 is on_policy_sparse.")
    direction: Literal["dense_to_shadow", "shadow_to_dense", "jsd"] = Field(
        "dense_to_shadow",
        description="KL(dense || sg shadow), KL(shadow || sg dense), or the Jensen-Shannon divergence of the two.",
    )
    estimator: str = Field(
        "full", description="The whole vocabulary (full) or its K most likely tokens (top-K, such as top-64)."
    )

    @field_validator("estimator")
    @classmethod
    def _known_estimator(cls, value: str) -> str:
        if not re.fullmatch(r"full|top-[1-9][0-9]*", value):
            raise ValueError(f"loss.smd.estimator = {value!r} is not known: write full, or top-K such as top-64.")
        return value

    @property
    def top_k(self) -> int | None:
        """K of top-K; None is the whole vocabulary."""
        return None if self.estimator == "full" else int(self.estimator.removeprefix("top-"))


class Loss(Section):
    """What is minimised: the policy loss and the terms beside it."""

    section: ClassVar[str] = "loss"

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = Field(
        "grpo", description="The policy loss: grpo dr_grpo dapo gspo cispo."
    )
    clip_low: float | None = Field(
        None, ge=0, le=1, description="The ratio is clipped below at 1 - this; by default the loss's own, 0.2 for grpo."
    )
    clip_high: float | None = Field(
        None, ge=0, description="The ratio is clipped above at 1 + this; by default the loss's own, 0.2 for grpo."
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of KL(learner || reference); 0 loads no reference.")
    kl_estimator: Estimator = Field(
        "k3",
        description="How that KL is estimated: k3 (GRPO's), k2 (has its gradient), k1 (a measure: as a loss it pulls nowhere).",
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    smd: SMD = Field(default_factory=SMD, description="The options of method smd.")

    @property
    def policy(self) -> PolicyLoss:
        """The policy loss."""
        return get(self.name)

    @property
    def clips(self) -> tuple[float, float]:
        """(clip_low, clip_high), the loss's own where not set."""
        own = self.policy
        low = own.clip_low if self.clip_low is None else self.clip_low
        return low, own.clip_high if self.clip_high is None else self.clip_high
