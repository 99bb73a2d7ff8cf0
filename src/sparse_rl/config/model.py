"""`model`: which weights are trained, in which dtype, whole or through adapters."""

from typing import ClassVar, Literal

from pydantic import Field

from .section import Section

WORTH_COMPILING = 50_000_000
"""Parameters. A smaller model is done before its layers are compiled, in the sampler and in the learner."""


class LoraConfig(Section):
    """Low-rank adapters (peft) in place of training every weight."""

    section: ClassVar[str] = "model.lora"

    rank: int = Field(0, ge=0, description="Of the adapters; 0 trains every weight.")
    alpha: float | None = Field(None, gt=0, description="Adapters are scaled by alpha / rank; twice the rank unless given.")
    targets: str = Field("all-linear", description="Layers that get one: all-linear, or names such as q_proj,v_proj.")
    merge: bool = Field(
        True, description="Whether the sampler has a merged copy of the adapted weights: faster, for one more copy of them."
    )


class ModelConfig(Section):
    """Which weights are trained."""

    section: ClassVar[str] = "model"

    path: str = Field(
        "tiny",
        description="A hub id, a folder, a GGUF file, smollm2-135m (a package of its own), or tiny: the embedded model.",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Of the passes; bfloat16 on a GPU, float32 on a CPU unless given. Master weights are float32 always."
    )
    device: str | None = Field(None, description="Such as cpu or cuda:0; cuda if there is one unless given.")
    trust_remote_code: bool = Field(False, description="Whether the model's own code from the hub may run.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")


class RanksConfig(Section):
    """Many processes as one run, started by torchrun or Ray."""

    section: ClassVar[str] = "ranks"

    count: int = Field(1, ge=1, description="How many; training sets it to what the launcher has started.")
    hold_gradients: bool = Field(
        True,
        description="Whether each rank holds whole gradients until the last micro-batch of an update, so that they are summed "
        "over ranks once; false takes less memory and sums after each.",
    )
    timeout_s: float = Field(
        1800,
        gt=0,
        le=86400,
        description="Seconds that ranks wait for one another, the slowest rollout of a step included.",
    )
