"""`optimizer`: AdamW, its schedule, and how rollouts become updates. The other sections stand beside their functions."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW, its schedule, and how a step's rollouts become updates."""

    section: ClassVar[str] = "optimizer"

    lr: float = Field(1e-6, gt=0, description="Learning rate after the warm-up.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="Of AdamW, such as [0.9, 0.98].")
    weight_decay: float = Field(0.1, ge=0, description="Of matrices; vectors are not decayed.")
    schedule: Literal["constant", "cosine"] = Field("constant", description="After the warm-up: constant, or cosine to 0.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate grows from 0.")
    clip_norm: float = Field(1.0, gt=0, description="Longer gradients are scaled down to this norm.")
    state: Literal["fp32", "8bit", "offload"] = Field(
        "fp32",
        description="Moments in float32, in 8 bits (needs torchao, and a compiler), or float32 with the master weights in host memory.",
    )
    updates_per_step: int = Field(1, ge=1, description="Optimizer updates a step's groups are dealt to.")
    tokens_per_microbatch: int = Field(16384, ge=1, description="Tokens, prompts included, in one pass of the learner.")
    gradient_checkpointing: bool = Field(False, description="Compute activations again in backward instead of keeping them.")
    max_skipped_updates: int = Field(
        5, ge=1, description="Updates in a row with a loss or gradient that is not finite, after which the run stops."
    )
