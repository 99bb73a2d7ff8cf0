"""`model`: the weights to train, their dtype, and full or adapter training."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from .section import Section

WORTH_COMPILING = 50_000_000
"""Number of parameters from which compilation pays off. A smaller model finishes before its layers are compiled, in sampler
and learner."""


class LoraConfig(Section):
    """LoRA adapters (peft) instead of full-parameter training."""

    section: ClassVar[str] = "model.lora"

    rank: int = Field(0, ge=0, description="LoRA rank; 0 trains all weights.")
    alpha: float | None = Field(None, gt=0, description="LoRA alpha (scale = alpha / rank); default: twice the rank.")
    targets: str = Field("all-linear", description="Adapted layers: all-linear, or names such as q_proj,v_proj.")
    merge: bool = Field(
        True,
        description="Sample from a merged copy; false merges in place, which saves GPU memory.",
    )
    base: Literal["auto", "4bit"] = Field(
        "auto",
        description="Storage of the frozen linear layers: auto (the model's dtype) or 4bit (NF4, bitsandbytes; never merged).",
    )

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        if self.base == "4bit" and not self.rank:
            raise ValueError("base = 4bit trains adapters only: set model.lora.rank, such as 16.")
        return self

    @property
    def merges_copy(self) -> bool:
        """True if the sampler has a merged copy of the adapted layers."""
        return bool(self.rank) and self.merge and self.base == "auto"

    @property
    def merges_in_place(self) -> bool:
        """True if adapters are merged into the layers for sampling, and the base weights restored from host memory."""
        return bool(self.rank) and not self.merge and self.base == "auto"


class ModelConfig(Section):
    """The model to train."""

    section: ClassVar[str] = "model"

    path: str = Field(
        "tiny",
        description="Hub id, folder, GGUF file, smollm2-135m (separate package) or tiny (embedded).",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="Dtype of compute; default: bfloat16 on a GPU, float32 on a CPU. Master weights are float32.",
    )
    head_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Dtype of the logits in sampler and learner.",
    )
    device: str | None = Field(None, description="Device, such as cuda:0; default: cuda if available.")
    trust_remote_code: bool = Field(False, description="Run the model's custom code from the hub.")
    routing_replay: bool = Field(
        False,
        description="Mixture of experts: the learner uses the experts that the sampler chose. One GPU only.",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")


class RanksConfig(Section):
    """Several processes that form one run, started by torchrun or Ray."""

    section: ClassVar[str] = "ranks"

    count: int = Field(
        1,
        ge=1,
        description="Number of ranks, one GPU each. The launcher sets it in training.",
    )
    hold_gradients: bool = Field(
        True,
        description="Reduce gradients once per update; false: per micro-batch, which saves memory.",
    )
    timeout_s: float = Field(
        1800,
        gt=0,
        le=86400,
        description="Seconds that ranks wait for each other; more than the slowest sampling phase.",
    )
