"""`Config`: all options of a training run, and the sections used only in training."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import UserError
from ..format import counted
from .advantage import AdvantageConfig
from .alerts import AlertsConfig
from .correction import CorrectionConfig, CorrectionSpec
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
"""Methods whose policy gradient is computed under the sampler's own view."""


MIN_DENSE_SLOTS = 16
"""Slots of a dense cache below which `eval.cache = auto` evaluates with the sampler's cache alone."""


class EvalConfig(Section):
    """Held-out evaluation before the first step, during training and after the last step."""

    section: ClassVar[str] = "eval"

    problems: int = Field(256, ge=0, description="Problems per held-out set, one rollout each; 0 disables evaluation.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after training.")
    cache: Literal["auto", "sparse", "dense", "both"] = Field(
        "auto",
        description=f"Cache; auto: both, or sparse if a dense cache fits fewer than {MIN_DENSE_SLOTS} slots.",
    )
    slots: int | Literal["auto"] = Field(
        "auto",
        description="Maximum concurrent problems; auto: the sampler's slots, or as many dense ones as fit.",
    )

    @model_validator(mode="after")
    def _check_slots(self) -> "EvalConfig":
        if self.slots != "auto" and self.slots < 1:
            raise ValueError(f"eval.slots = {self.slots} is invalid: it must be at least 1, or auto.")
        return self


class CheckpointConfig(Section):
    """Interval and number of checkpoints."""

    section: ClassVar[str] = "checkpoint"

    every: int = Field(10, ge=1, description="Steps between checkpoints; the last step is always saved.")
    keep: int = Field(2, ge=1, description="Latest checkpoints to keep.")
    best: str = Field(
        "reward/mean",
        description="Metric whose best checkpoint is also kept.",
    )


class LogConfig(Section):
    """Stored rollouts and additional loggers."""

    section: ClassVar[str] = "log"

    rollouts_per_step: int = Field(32, ge=0, description="Rollouts stored per step, rejected ones first.")
    traces_per_step: int = Field(2, ge=0, description="Stored rollouts per step that include their evictions.")
    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description='Additional loggers, such as ["tensorboard"].'
    )


class RayConfig(Section):
    """Run the ranks as workers of a Ray cluster."""

    section: ClassVar[str] = "ray"

    workers: int = Field(0, ge=0, description="Ranks that Ray starts; 0 disables Ray.")
    address: str | None = Field(None, description="Address of a Ray cluster, such as auto; default: a new local one.")
    cpus_per_worker: float = Field(1, gt=0, description="CPUs per worker.")
    gpus_per_worker: float | None = Field(None, ge=0, description="GPUs per worker; default: 1 if the cluster has any.")
    max_failures: int = Field(3, ge=0, description="Maximum restarts after a worker is lost.")


class Config(Section):
    """All options of a training run."""

    section: ClassVar[str] = ""

    method: Method = Field("sparse_rl", description="Training method.")
    compare: tuple[Method, ...] = Field(
        (), description='Methods to train in turn and compare, such as ["dense", "sparse_rl"].'
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Base seed; all randomness derives from it.")
    steps: int = Field(100, ge=1, description="Training steps.")
    run_dir: str = Field(
        "runs/train",
        description="Run folder: a path, or an fsspec address such as s3://bucket/runs/mine.",
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
    def _check_combination(self) -> "Config":
        if self.optimizer.updates_per_step > self.rollout.prompts_per_step:
            raise ValueError(
                f"optimizer.updates_per_step = {self.optimizer.updates_per_step} must not exceed rollout.prompts_per_step "
                f"= {self.rollout.prompts_per_step}, because each update needs at least one group: lower updates_per_step "
                "or raise prompts_per_step."
            )
        if len(set(self.compare)) < len(self.compare):
            raise ValueError(f"compare = {list(self.compare)} lists a method twice: list each method once.")
        if self.kv.budget == "auto" and self.rollout.slots != "auto":
            raise ValueError(
                f"kv.budget = auto and rollout.slots = {self.rollout.slots} contradict each other: a larger budget takes the "
                "memory of slots. Remove rollout.slots, or set kv.budget to a number."
            )
        if self.advantage.overlong > self.rollout.max_tokens:
            raise ValueError(
                f"advantage.overlong = {self.advantage.overlong} exceeds rollout.max_tokens = {self.rollout.max_tokens}, "
                f"so every answer would be penalized. Try --advantage.overlong {self.rollout.max_tokens // 4}."
            )
        spec = self.correction_spec  # raises if the options are inconsistent
        options = self.correction.model_dump(exclude={"opsm"}, exclude_none=True)
        if self.method in SHADOW_METHODS and options not in ({}, {"preset": "none"}):
            key, value = next(iter(options.items()))
            raise ValueError(
                f"correction.{key} = {value} has no effect with method = {self.method}, whose policy gradient uses the "
                "sampler's own log-probs: remove it."
            )
        if self.rollout.refill_rejected and not spec.rejects_sequences:
            remedy = "remove it" if self.method in SHADOW_METHODS else "remove it, or set correction.preset to paper"
            raise ValueError(
                f"rollout.refill_rejected = true has no effect with method = {self.method} and correction.preset = "
                f"{self.correction.preset or self.default_preset}, which reject no sequence: {remedy}."
            )
        return self

    @property
    def default_preset(self) -> str:
        return "paper" if self.method == "sparse_rl" else "none"

    @property
    def correction_spec(self) -> CorrectionSpec:
        return self.correction.spec(self.default_preset)

    @property
    def limits(self) -> AlertsConfig:
        """Return the limits of the alerts. Methods that learn on the sampler's view have no mismatch to correct."""
        corrected = self.method in SHADOW_METHODS or self.correction_spec.corrects or self.correction.opsm is not None
        return self.alerts.resolved(corrected=corrected)

    @property
    def refill(self) -> bool:
        """Return whether groups without a signal are dropped and other prompts sampled: dynamic sampling."""
        return self.loss.name == "dapo" if self.rollout.refill is None else self.rollout.refill

    @property
    def evaluated_problems(self) -> int:
        """Return the maximum number of problems of each held-out set; 0 if the run is not evaluated."""
        return self.eval.problems if self.data.held_out else 0

    def evaluation_caches(self, *, is_sparse: bool, dense_slots: int | None, problems: int) -> list[str]:
        """Return the caches of the held-out evaluation: dense, sparse or both. The plan and the trainer use this rule.

        A sampler that neither evicts nor quantises keys has only a dense cache. `eval.cache = auto` leaves the dense cache out
        if it has few slots, unless `eval.slots` sets them or `checkpoint.best` is a dense score. `dense_slots` is None if memory
        is not planned.
        """
        if not problems or not is_sparse:
            return ["dense"] if problems else []
        chosen, best = self.eval.cache, self.checkpoint.best
        if chosen == "auto":
            asked = self.eval.slots != "auto" or (best.startswith("eval/") and "_sparse" not in best.rpartition("/")[2])
            few = dense_slots is not None and dense_slots < min(MIN_DENSE_SLOTS, problems)
            chosen = "sparse" if few and not asked else "both"
        return ["dense", "sparse"] if chosen == "both" else [chosen]

    def evaluates_after(self, step: int) -> bool:
        """Return whether the held-out sets are evaluated after `step`: every `eval.every` steps and after the last."""
        return step == self.steps or bool(self.eval.every and step % self.eval.every == 0)

    @property
    def one_pass(self) -> bool:
        """Return whether the first update of a step takes its old log-probs from its own training pass.

        It cannot in three cases. `rollout.refill_rejected` needs old log-probs while it samples. The shadow methods train on
        another view. `correction.normalize` divides the policy term by a mean over the update, and if the loss has other
        terms, this mean must be known before the pass.
        """
        normalize = self.correction_spec.normalize
        before = self.rollout.refill_rejected or (normalize and self.loss.has_other_terms)
        return self.method not in SHADOW_METHODS and not before

    @property
    def defaults_comment(self) -> str:
        """Return a TOML comment with the effective values of options that the method, the loss or the task determines. It is
        added to the stored recipe."""
        low, high = self.loss.clips
        parts = [f"loss.clip_low = {low:g}, loss.clip_high = {high:g}"]
        if self.method in SHADOW_METHODS:
            parts.append("no correction")
        elif self.correction.preset is None:
            parts.append(f"correction.preset = {self.default_preset} (of method = {self.method})")
        if self.reward.function is None and self.data.train in TASK_REWARDS:
            parts.append(f"reward.function = {TASK_REWARDS[self.data.train]}")
        return f"# defaults in effect: {', '.join(parts)}\n"

    @property
    def sets_budget(self) -> bool:
        """Return whether the run sets its budget itself. Method `dense` has none."""
        return self.kv.budget == "auto" and self.method != "dense"

    def longest_kept(self, prompt_tokens: int) -> int:
        """Return the tokens of the longest sequence that count towards the budget. A larger budget never evicts."""
        return self.rollout.max_tokens + (0 if self.kv.protect_prompt else prompt_tokens)

    def with_budget(self, budget: int) -> "Config":
        return self.changed(kv={"budget": budget})

    def with_known_budget(self, prompt_tokens: int) -> "Config":
        """Return the configuration with half of the longest sequence as its budget, if that is auto: for plans."""
        if self.kv.budget != "auto":
            return self
        return self.with_budget(max(self.kv.least_auto, self.longest_kept(prompt_tokens) // 2))

    @property
    def sampler_kv(self) -> KV:
        """KV options of the sampler. Method `dense` uses the policy `full`."""
        return KV(policy="full") if self.method == "dense" else self.kv

    def refuse_unused_bits(self) -> None:
        """Raise UserError if a run with method dense asks for a quantised cache. In a comparison, the other methods use it."""
        if self.method == "dense" and not self.compare and self.kv.quantised:
            raise UserError(
                f"kv.dtype = {self.kv.dtype} has no effect with method = dense, which samples in the model's dtype: set method = "
                f"sparse_rl and kv.policy = full to keep all keys in {self.kv.dtype.removesuffix('bit')} bits, or kv.dtype = auto."
            )

    def cache_warning(self, prompts: Sequence[Sequence[int]]) -> str | None:
        """Return a warning if these training prompts and their responses do not suit the budget; else None.

        Raise UserError if the run sets its budget itself and no budget evicts: the probe would measure nothing.
        """
        warning = self.sampler_kv.remark(prompts, self.rollout.max_tokens)
        if warning and self.sets_budget:
            raise UserError(warning)
        return warning

    @property
    def batch_summary(self) -> str:
        """Summary of the batch in one sentence."""
        rollout, updates = self.rollout, self.optimizer.updates_per_step
        per_update = rollout.rollouts_per_step // updates
        again = f"; refill samples up to {MAX_DRAWS} times as many where groups have no signal" if self.refill else ""
        if self.rollout.refill_rejected:
            again += f"; refill_rejected samples rejected rollouts again, up to {MAX_DRAWS - 1} times"
        return (
            f"{counted(self.steps, 'step')} of {counted(rollout.prompts_per_step, 'prompt')} x {rollout.samples_per_prompt} "
            f"samples = {rollout.rollouts_per_step} rollouts of at most {rollout.max_tokens:,} tokens; "
            f"{counted(updates, 'update')} of {per_update} rollouts per step, "
            f"{self.optimizer.tokens_per_microbatch:,} tokens per micro-batch{again}."
        )
