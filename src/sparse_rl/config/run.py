"""`Config`: every option of a training run, and the sections that only training has."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from .advantage import AdvantageConfig
from .alerts import AlertsConfig
from .correction import CorrectionConfig
from .data import DataConfig
from .kv import KV
from .loss import LossConfig
from .model import ModelConfig, RanksConfig
from .optimizer import OptimizerConfig
from .reward import TASK_REWARDS, RewardConfig
from .rollout import MAX_DRAWS, RolloutConfig
from .section import Section

Method = Literal["dense", "naive", "sparse_rl", "smd", "on_policy_sparse"]
SHADOW_METHODS = ("smd", "on_policy_sparse")
"""Those whose policy gradient runs on the sampler's own view."""


class EvalConfig(Section):
    """Held-out problems, sampled as in training, before the first step and after the last."""

    section: ClassVar[str] = "eval"

    problems: int = Field(256, ge=0, description="Held-out problems, one rollout each; 0 turns evaluation off.")
    every: int = Field(0, ge=0, description="Also after every so many steps; 0 is only before and after.")
    slots: int | Literal["auto"] = Field(
        "auto",
        description="Problems that run at a time; auto is the sampler's slots, for a dense cache beside the sampler's as many as "
        "stay under the peak of a step.",
    )

    @model_validator(mode="after")
    def _slots_are_some(self) -> "EvalConfig":
        if self.slots != "auto" and self.slots < 1:
            raise ValueError(f"eval.slots = {self.slots} must be at least 1, or auto.")
        return self


class CheckpointConfig(Section):
    """When the run is saved, and what is kept."""

    section: ClassVar[str] = "checkpoint"

    every: int = Field(10, ge=1, description="Steps between checkpoints; the last step is always one.")
    keep: int = Field(2, ge=1, description="Latest checkpoints that are kept.")
    best: str = Field(
        "reward/mean",
        description="The metric whose highest value marks the checkpoint that is kept besides. What rollouts earn counts for the "
        "checkpoint they were sampled from, one of eval/ for the step it was measured after.",
    )


class LogConfig(Section):
    """What is written down beside metrics.jsonl."""

    section: ClassVar[str] = "log"

    rollouts_per_step: int = Field(32, ge=0, description="Rollouts stored of each step, rejected ones first.")
    traces_per_step: int = Field(2, ge=0, description="Of those, how many with the time each key was evicted.")
    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description='Where metrics go besides, such as ["tensorboard"].'
    )


class RayConfig(Section):
    """The ranks as workers of a Ray cluster."""

    section: ClassVar[str] = "ray"

    workers: int = Field(0, ge=0, description="Ranks that Ray starts; 0 is without Ray.")
    address: str | None = Field(None, description="Of a running cluster, such as auto; by default one is started here.")
    cpus_per_worker: float = Field(1, gt=0, description="CPUs that each worker reserves.")
    gpus_per_worker: float | None = Field(
        None, ge=0, description="GPUs that each worker reserves; by default 1 where the cluster has any."
    )
    max_failures: int = Field(3, ge=0, description="Times that lost workers are started again from the last checkpoint.")


class Config(Section):
    """A training run."""

    section: ClassVar[str] = ""

    method: Method = Field("sparse_rl", description="dense, naive, sparse_rl, smd or on_policy_sparse.")
    compare: tuple[Method, ...] = Field(
        (), description='Run these methods one after the other and compare, such as ["dense", "sparse_rl"].'
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Of everything that is drawn.")
    steps: int = Field(100, ge=1, description="Rounds of rollouts and updates.")
    run_dir: str = Field(
        "runs/train",
        description="The folder of the run: a path, or an address that fsspec knows, such as s3://bucket/runs/mine.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    kv: KV = Field(default_factory=KV)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    alerts: AlertsConfig = Field(default_factory=AlertsConfig)
    ranks: RanksConfig = Field(default_factory=RanksConfig)
    ray: RayConfig = Field(default_factory=RayConfig)

    @model_validator(mode="after")
    def _parts_fit(self) -> "Config":
        if self.optimizer.updates_per_step > self.rollout.prompts_per_step:
            raise ValueError(
                f"optimizer.updates_per_step = {self.optimizer.updates_per_step} needs at least as many groups, but "
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step}: lower the first or raise the second."
            )
        if len(set(self.compare)) < len(self.compare):
            raise ValueError(f"compare = {list(self.compare)} names a method twice, but each has one folder: name it once.")
        if self.advantage.overlong > self.rollout.max_tokens:
            raise ValueError(
                f"advantage.overlong = {self.advantage.overlong} exceeds rollout.max_tokens = {self.rollout.max_tokens}: every "
                f"answer would be too long. Try --advantage.overlong {self.rollout.max_tokens // 4}."
            )
        self.correction.point(self.default_preset)  # says what does not fit in it
        given = self.correction.model_dump(exclude={"opsm"}, exclude_none=True)
        if self.method in SHADOW_METHODS and given not in ({}, {"preset": "none"}):
            key, value = next(iter(given.items()))
            raise ValueError(
                f"correction.{key} = {value} has nothing to correct under method = {self.method}, which learns on the "
                "sampler's own view: leave it out."
            )
        return self

    @property
    def default_preset(self) -> str:
        return "paper" if self.method == "sparse_rl" else "none"

    @property
    def unset(self) -> str:
        """What is in force where an option was left to the method, the loss or the task; a comment of the stored recipe."""
        low, high = self.loss.clips
        parts = [f"loss.clip_low = {low:g}, loss.clip_high = {high:g}"]
        if self.method in SHADOW_METHODS:
            parts.append("no correction")
        elif self.correction.preset is None:
            parts.append(f"correction.preset = {self.default_preset} (of method = {self.method})")
        if self.reward.function is None and self.data.train in TASK_REWARDS:
            parts.append(f"reward.function = {TASK_REWARDS[self.data.train]}")
        return f"# in force where not set: {', '.join(parts)}\n"

    @property
    def sampler_kv(self) -> KV:
        """What the sampler keeps: everything under `dense`."""
        return KV(policy="full") if self.method == "dense" else self.kv

    @property
    def arithmetic(self) -> str:
        """The batch in one sentence."""
        rollout, updates = self.rollout, self.optimizer.updates_per_step
        per_update = rollout.rollouts_per_step // updates
        again = (
            f"; dapo samples up to {MAX_DRAWS} times as many where groups have no signal" if self.loss.name == "dapo" else ""
        )
        return (
            f"{self.steps} steps of {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
            f"{rollout.rollouts_per_step} rollouts of at most {rollout.max_tokens:,} tokens, learned in {updates} "
            f"update{'s' if updates > 1 else ''} of {per_update} rollouts, "
            f"{self.optimizer.tokens_per_microbatch:,} tokens at a time{again}."
        )
