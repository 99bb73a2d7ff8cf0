"""`optimizer`: AdamW, its schedule, and the number of updates per step."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW, its schedule, and the number of updates per step."""

    section: ClassVar[str] = "optimizer"

    lr: float = Field(1e-6, gt=0, description="Peak learning rate, reached after the warm-up.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="AdamW betas.")
    weight_decay: float = Field(0.1, ge=0, description="AdamW weight decay, for matrices only.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    clip_norm: float = Field(1.0, gt=0, description="Maximum gradient norm.")
    state: Literal["fp32", "8bit", "offload"] = Field(
        "fp32",
        description="Adam moments: fp32, 8bit (needs torchao and a compiler), or offload (host memory, with the master weights).",
    )
    updates_per_step: int = Field(1, ge=1, description="Optimizer updates per step; each gets a part of the groups.")
    tokens_per_microbatch: int = Field(16384, ge=1, description="Tokens per learner pass, prompts included.")
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Recompute activations in all layers, in none, or (auto) in as few as memory allows.",
    )
    max_skipped_updates: int = Field(5, ge=1, description="Stop after this many consecutive non-finite updates.")
