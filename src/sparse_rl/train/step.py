"""One training step: sample and grade, compute old log-probs, correct the mismatch, update, compute metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ..config import SHADOW_METHODS, Config
from ..learner.correction import Corrected, correct
from ..learner.old_logprobs import old_logprobs
from ..learner.optimizer import Optimizer
from ..learner.replay import ReplayKind
from ..learner.update import Updated, make_batch, padded, response_mask, update
from ..models.actor import Actor
from ..rollout.clock import device_time
from ..rollout.engine import Engine
from ..rollout.rollout import Rollout
from ..world import World
from .metrics import engine_noise, kv_metrics, policy_metrics, response_metrics, reward_metrics
from .rollouts import RolloutBatch, RolloutGroup, RolloutSampler

NOISE_ROLLOUTS = 8
"""Number of rollouts replayed per step to measure engine noise, for methods that do not replay every rollout."""
ENGINE_PARTS = ("prefill_s", "decode_s", "compaction_s")


@dataclass(frozen=True)
class OldLogprobs:
    """Log-probs of a step's responses under the weights that sampled them."""

    dense: list[Tensor]
    learned: list[Tensor]
    """Log-probs that the policy gradient uses: `dense`, or a replay under the sampler's evictions for shadow methods."""
    reference: list[Tensor] | None
    entropy: float
    engine_noise: float


@dataclass(frozen=True)
class StepResult:
    batch: RolloutBatch
    old: OldLogprobs
    corrected: Corrected
    """Mismatch correction computed over all rollouts of the step."""
    updates: list[Updated]
    seconds: dict[str, float] = field(default_factory=dict)


class TrainingStep:
    """Runs one training step: `sample`, then `learn`, then `metrics`."""

    def __init__(
        self,
        config: Config,
        rollout_sampler: RolloutSampler,
        engine: Engine,
        actor: Actor,
        optimizer: Optimizer,
        world: World,
    ):
        self.config, self.rollout_sampler, self.engine = config, rollout_sampler, engine
        self.actor, self.optimizer, self.world = actor, optimizer, world
        self.shadow = config.method in SHADOW_METHODS
        self.view: ReplayKind = "sparse" if self.shadow else "dense"

    def sample(self, cursor: int, progress) -> RolloutBatch:
        """Sample and grade the groups of one step, from prompt number `cursor` on."""
        return self.rollout_sampler.draw(cursor, progress)

    def learn(self, step: int, batch: RolloutBatch) -> StepResult:
        """Update the weights from a batch. `step` counts from 0."""
        started = self._now()
        # 1. Compute old and reference log-probs
        old = self._old_logprobs(batch)
        # 2. Measure the sampler's mismatch over the whole step
        corrected = self._correct(batch, range(len(batch.samples)), old, on_policy=False)
        old_s = self._now() - started
        # 3. Run one optimizer update per part of the groups
        parts = split_groups(self.rollout_sampler.learnable(batch), self.config.optimizer.updates_per_step)
        updates = [self._update(step, batch, groups, old) for groups in parts]
        update_s = self._now() - started - old_s
        # 4. Copy the new weights to the sampler
        self.actor.sync()
        seconds = {"old_logprobs_s": old_s, "update_s": update_s, "learner_s": self._now() - started}
        return StepResult(batch, old, corrected, updates, seconds)

    def metrics(self, step: int, result: StepResult, rollout_s: float) -> dict[str, float]:
        """Return the metrics of the step over all rollouts, before masking. `step` counts from 0."""
        batch, seconds = result.batch, result.seconds
        rollouts = [sample.rollout for sample in batch.samples]
        tokens = sum(len(rollout.response) for rollout in rollouts)
        passed = sum(len(rollout.prompt) for rollout in rollouts) + tokens
        return {
            **reward_metrics(batch),
            **result.corrected.metrics,
            "sparse/engine_noise": result.old.engine_noise,
            **kv_metrics(batch, self.engine),
            **policy_metrics(result.updates, tokens, result.old.entropy, self.optimizer.lr_at(step)),
            **response_metrics(rollouts),
            "perf/rollout_s": rollout_s,
            **{f"perf/{name}": sum(getattr(each, name) for each in batch.stats) for name in ENGINE_PARTS},
            "perf/grade_s": batch.grade_s,
            **({"perf/rank_wait": batch.waited_s / batch.sampled_s} if self.world.size > 1 else {}),
            **{f"perf/{name}": value for name, value in seconds.items()},
            "perf/rollout_tokens_per_s": tokens / rollout_s,
            "perf/learner_tokens_per_s": passed / seconds["learner_s"],
        }

    def _old_logprobs(self, batch: RolloutBatch) -> OldLogprobs:
        rollouts = [sample.rollout for sample in batch.samples]
        dense, entropy = self._logprobs(self.actor.learner, rollouts, "dense")
        learned, reference = dense, None
        if self.shadow:
            learned, _ = self._logprobs(self.actor.learner, rollouts, "sparse")
        if self.config.loss.kl_coef > 0:
            with self.actor.reference() as model:
                reference, _ = self._logprobs(model, rollouts, self.view)
        return OldLogprobs(dense, learned, reference, entropy, self._noise(rollouts, dense, learned))

    def _logprobs(self, model, rollouts: Sequence[Rollout], view: ReplayKind) -> tuple[list[Tensor], float]:
        return old_logprobs(model, rollouts, view, self.config.optimizer.tokens_per_microbatch, self.world)

    def noise_rows(self, count: int) -> Sequence[int]:
        """Return the indices of the rollouts that are replayed under their evictions: all for shadow methods, else a few."""
        return range(count) if self.shadow else range(0, count, max(1, count // NOISE_ROLLOUTS))[:NOISE_ROLLOUTS]

    def _noise(self, rollouts: Sequence[Rollout], dense: Sequence[Tensor], learned: Sequence[Tensor]) -> float:
        """Return the engine noise. If the policy evicts nothing, the dense pass already is the replay."""
        if self.shadow or not self.engine.policy.evicts:
            return engine_noise(rollouts, learned if self.shadow else dense)
        few = [rollouts[row] for row in self.noise_rows(len(rollouts))]
        return engine_noise(few, self._logprobs(self.actor.learner, few, "sparse")[0])

    def _correct(self, batch: RolloutBatch, rows: Sequence[int], old: OldLogprobs, *, on_policy: bool) -> Corrected:
        """Return the correction for xi = pi_old / pi_sampler of these rows. `on_policy` sets xi = 1, for shadow methods."""
        samples = batch.samples
        rollouts = [samples[row].rollout for row in rows]
        dense = [old.dense[row] for row in rows]
        mask_BT = response_mask(rollouts).to(dense[0].device)
        log_xi_BT = padded(dense) - padded([rollout.logprobs for rollout in rollouts]).to(dense[0].device)
        spec = self.config.correction.spec(self.config.default_preset)
        if not on_policy:
            return correct(log_xi_BT, mask_BT, spec)
        finite_BT = log_xi_BT.isfinite() & padded([old.learned[row] for row in rows]).isfinite()
        return correct(torch.zeros_like(log_xi_BT), mask_BT, spec, broken=(mask_BT & ~finite_BT).any(dim=1))

    def _update(self, step: int, batch: RolloutBatch, groups: Sequence[RolloutGroup], old: OldLogprobs) -> Updated:
        config = self.config
        samples = [sample for group in groups for sample in group.samples if sample.in_loss]
        if not samples:
            return Updated({}, 0.0, learned=False, finite=True)
        rows = [sample.row for sample in samples]
        update_batch = make_batch(
            [sample.rollout for sample in samples],
            torch.tensor([sample.advantage for sample in samples], dtype=old.dense[0].dtype),
            [old.learned[row] for row in rows],
            self._correct(batch, rows, old, on_policy=self.shadow),
            config.loss,
            config.rollout.max_tokens,
            None if old.reference is None else [old.reference[row] for row in rows],
        )
        return update(
            self.actor.learner,
            self.optimizer,
            step,
            update_batch,
            config.loss,
            view=self.view,
            smd=config.loss.smd if config.method == "smd" else None,
            opsm_delta=config.correction.opsm,
            world=self.world,
        )

    def _now(self) -> float:
        return device_time(self.actor.learner.device)


def split_groups(groups: Sequence[RolloutGroup], updates: int) -> list[Sequence[RolloutGroup]]:
    """Split the groups, in order, into `updates` parts of nearly equal size."""
    edges = [round(number * len(groups) / updates) for number in range(updates + 1)]
    return [groups[start:stop] for start, stop in pairwise(edges)]
