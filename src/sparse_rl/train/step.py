"""One training step: sample and grade, compute old log-probs, correct the mismatch, update, compute metrics."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SHADOW_METHODS, Config
from ..kernels.counter_rng import derive
from ..learner.batch import Batch, OnePassBatch, make_batch, make_one_pass_batch, padded, response_mask
from ..learner.correction import Corrected, correct, long_tail, weigh
from ..learner.objective import Objective
from ..learner.old_logprobs import old_logprobs
from ..learner.optimizer import Optimizer
from ..learner.packing import packs
from ..learner.replay import ReplayKind
from ..learner.update import UpdateResult, update
from ..models.actor import Actor
from ..rollout.clock import device_time
from ..rollout.engine import Engine
from ..rollout.stats import Stats
from ..sizes import NOISE_ROLLOUTS
from ..world import World
from .metrics import engine_noise, kv_metrics, policy_metrics, response_metrics, reward_metrics
from .passes import plan_passes
from .rollouts import ProgressCallback, RolloutBatch, RolloutGroup, RolloutSampler

ENGINE_PARTS = ("prefill_s", "decode_s", "compaction_s")


@dataclass
class OldLogprobs:
    """Log-probs of a step's responses under the weights that sampled them, by row of the step."""

    dense: dict[int, Tensor]
    learned: dict[int, Tensor]
    """Log-probs of the view that the policy gradient runs on: `dense`, or the sampler's own view."""
    entropies: dict[int, float]
    """Sum of the entropy over a row's tokens."""
    reference: dict[int, Tensor] | None = None


@dataclass(frozen=True)
class StepResult:
    """Updates and correction of one step, for its metrics and logs."""

    batch: RolloutBatch
    old: OldLogprobs
    row_weights: dict[int, float]
    """Rows with old log-probs, and the number of rows that each represents in the metrics."""
    corrected: Corrected
    """Correction over these rows, in order."""
    engine_noise: float
    updates: list[UpdateResult]
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def log_xi(self) -> dict[int, Tensor]:
        """log pi_old - log pi_sampler of the rows with old log-probs, on the CPU."""
        samples = self.batch.samples
        return {row: self.old.dense[row].cpu() - samples[row].rollout.logprobs for row in self.row_weights}

    @property
    def entropy(self) -> float:
        """Mean entropy per token."""
        tokens = {row: len(self.batch.samples[row].rollout.response) for row in self.row_weights}
        total = sum(weight * self.old.entropies[row] for row, weight in self.row_weights.items())
        return total / sum(weight * tokens[row] for row, weight in self.row_weights.items())


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
        self.objective = Objective.of(config)
        self.spec = config.correction_spec

    def sample(self, cursor: int, progress: ProgressCallback | None) -> RolloutBatch:
        """Sample and grade the groups of one step, from prompt number `cursor` on."""
        self.actor.merge()
        replaces = self.config.rollout.refill_rejected
        return self.rollout_sampler.draw(cursor, progress, self._find_rejected if replaces else None)

    def _find_rejected(self, batch: RolloutBatch, rows: Sequence[int]) -> list[int]:
        """Return the rows that the correction rejects. Add their old log-probs to the batch, for the update."""
        started = self._now()
        self.actor.restore()
        dense, entropies = self._logprobs(self.actor.learner, batch, rows, "dense")
        batch.old_logprobs |= {row: (dense[row], entropies[row]) for row in rows}
        rejected_B = weigh(*self._log_xi(batch, rows, dense), self.spec).rejected
        rejected = [row for row, is_rejected in zip(rows, rejected_B.tolist(), strict=True) if is_rejected]
        self.actor.merge()
        batch.old_logprobs_s += self._now() - started
        return self.world.gather(rejected)[0]  # ranks must sample the same rows again

    def learn(self, step: int, batch: RolloutBatch) -> StepResult:
        """Update the weights from a batch. `step` counts from 0."""
        started = self._now()
        self.actor.restore()
        config = self.config
        groups = split_groups(self.rollout_sampler.learnable(batch), config.optimizer.updates_per_step)
        plan = plan_passes(config, self.spec, batch, groups, derive(config.seed, step))
        # 1. Log-probs that the first training pass does not give: for later updates, rows without a signal and the reference
        old = self._old_logprobs(batch, plan.before, groups)
        noise = self._replay_noise(batch)
        before_s = self._now() - started
        # 2. One optimizer update for each part of the groups
        updates = [
            self._update(step, batch, part, old, one_pass=config.one_pass and number == 0)
            for number, part in enumerate(groups)
        ]
        update_s = self._now() - started - before_s
        # 3. New weights for the sampler
        self.actor.sync()
        # 4. The mismatch of sampler and learner over the whole step, for metrics: the updates corrected it for themselves
        row_weights = {row: weight for row, weight in plan.row_weights.items() if row in old.dense}
        corrected = self._mismatch(batch, old, row_weights)
        if noise is None:
            rollouts = {row: batch.samples[row].rollout for row in row_weights}
            noise = engine_noise(list(rollouts.values()), [old.learned[row] for row in rollouts])
        learner_s = self._now() - started + batch.old_logprobs_s
        seconds = {"old_logprobs_s": before_s + batch.old_logprobs_s, "update_s": update_s, "learner_s": learner_s}
        return StepResult(batch, old, row_weights, corrected, noise, updates, seconds)

    def metrics(self, step: int, result: StepResult, rollout_s: float) -> dict[str, float]:
        """Return the metrics of the step over all rollouts, also over those that the correction rejects. `step` counts from 0."""
        batch, seconds = result.batch, result.seconds
        rollouts = [sample.rollout for sample in batch.samples]
        tokens = sum(len(rollout.response) for rollout in rollouts)
        learner_tokens = sum(len(rollouts[row].prompt) + len(rollouts[row].response) for row in result.row_weights)
        return {
            **reward_metrics(batch),
            **result.corrected.metrics,
            "sparse/xi_p05_long": long_tail(list(result.log_xi.values()), list(result.row_weights.values())),
            **({"sparse/replaced": float(len(batch.replaced))} if self.config.rollout.refill_rejected else {}),
            "sparse/engine_noise": result.engine_noise,
            **kv_metrics(batch.stats, rollouts, self.engine),
            **policy_metrics(result.updates, tokens, result.entropy, self.optimizer.lr_at(step)),
            **response_metrics(rollouts),
            "perf/rollout_s": rollout_s,
            **{f"perf/{name}": sum(getattr(each, name) for each in batch.stats) for name in ENGINE_PARTS},
            "perf/idle_slots": functools.reduce(Stats.merged_with, batch.stats).idle_share,
            "perf/grade_s": batch.grade_s,
            **({"perf/rank_wait": batch.waited_s / batch.sampled_s} if self.world.size > 1 else {}),
            **{f"perf/{name}": value for name, value in seconds.items()},
            "perf/rollout_tokens_per_s": tokens / rollout_s,
            "perf/learner_tokens_per_s": learner_tokens / seconds["learner_s"],
        }

    def _old_logprobs(
        self, batch: RolloutBatch, rows: Sequence[int], updates: Sequence[Sequence[RolloutGroup]]
    ) -> OldLogprobs:
        """Compute the log-probs of these rows, and of the reference for the rows of the updates."""
        learner = self.actor.learner
        dense, entropies = self._logprobs(learner, batch, [row for row in rows if row not in batch.old_logprobs], "dense")
        dense |= {row: logprobs for row, (logprobs, _) in batch.old_logprobs.items()}
        entropies |= {row: entropy for row, (_, entropy) in batch.old_logprobs.items()}
        learned = self._logprobs(learner, batch, rows, "sparse")[0] if self.shadow else dense
        old = OldLogprobs(dense, learned, entropies)
        if self.config.loss.kl_coef > 0:
            in_loss = [sample.row for part in updates for group in part for sample in group.samples if sample.in_loss]
            with self.actor.reference() as model:
                old.reference, _ = self._logprobs(model, batch, in_loss, self.objective.view)
        return old

    def _logprobs(
        self, model: PreTrainedModel, batch: RolloutBatch, rows: Sequence[int], view: ReplayKind
    ) -> tuple[dict[int, Tensor], dict[int, float]]:
        """Return (log-probs, sum of the entropy) of each row under the current weights."""
        samples = batch.samples
        logprobs, entropies = old_logprobs(
            model, [samples[row].rollout for row in rows], view, self.config.optimizer.tokens_per_microbatch, self.world
        )
        return dict(zip(rows, logprobs, strict=True)), dict(zip(rows, entropies, strict=True))

    def _replay_noise(self, batch: RolloutBatch) -> float | None:
        """Return the engine noise of a few rows, as many as one pass replays. None if the old log-probs already are the replay:
        with a dense cache, or if the loss uses the sampler's view."""
        if self.shadow or not self.engine.is_sparse:
            return None
        rows = batch.recorded[:NOISE_ROLLOUTS]
        rollouts = [batch.samples[row].rollout for row in rows]
        first = next(packs(rollouts, self.config.optimizer.tokens_per_microbatch, share_prompts=False))
        rows = rows[: len(first)]
        replayed, _ = self._logprobs(self.actor.learner, batch, rows, "sparse")
        return engine_noise(rollouts[: len(rows)], list(replayed.values()))

    def _mismatch(self, batch: RolloutBatch, old: OldLogprobs, row_weights: dict[int, float]) -> Corrected:
        """Correct for xi = pi_old / pi_sampler over the rows with log-probs, for the metrics and the list of rejected rows."""
        log_xi_BT, mask_BT = self._log_xi(batch, list(row_weights), old.dense)
        return correct(log_xi_BT, mask_BT, self.spec, row_weights=torch.tensor(list(row_weights.values())).to(mask_BT.device))

    def _log_xi(self, batch: RolloutBatch, rows: Sequence[int], dense: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (log pi_old - log pi_sampler, mask of the responses), [B, T]."""
        rollouts = [batch.samples[row].rollout for row in rows]
        dense_BT = padded([dense[row] for row in rows])
        sampler_BT = padded([rollout.logprobs for rollout in rollouts]).to(dense_BT.device)
        return dense_BT - sampler_BT, response_mask(rollouts).to(dense_BT.device)

    def _correct(self, batch: RolloutBatch, rows: Sequence[int], old: OldLogprobs) -> Corrected:
        """Correct the rows of one update. In the sampler's view, xi is 1 by definition."""
        log_xi_BT, mask_BT = self._log_xi(batch, rows, old.dense)
        if not self.shadow:
            return correct(log_xi_BT, mask_BT, self.spec)
        finite_BT = log_xi_BT.isfinite() & padded([old.learned[row] for row in rows]).isfinite()
        return correct(torch.zeros_like(log_xi_BT), mask_BT, self.spec, broken=(mask_BT & ~finite_BT).any(dim=1))

    def _update(
        self, step: int, batch: RolloutBatch, groups: Sequence[RolloutGroup], old: OldLogprobs, *, one_pass: bool
    ) -> UpdateResult:
        """Update the weights once. In one pass, add the log-probs of the trained rows to `old`."""
        config, learner = self.config, self.actor.learner
        samples = [sample for group in groups for sample in group.samples if sample.in_loss]
        if not samples:
            return UpdateResult({}, 0.0, learned=False, finite=True)
        rows = [sample.row for sample in samples]
        rollouts = [sample.rollout for sample in samples]
        advantages_B = torch.tensor(
            [sample.advantage for sample in samples], dtype=torch.promote_types(learner.dtype, torch.float32)
        )
        reference = None if old.reference is None else [old.reference[row] for row in rows]
        update_batch: Batch | OnePassBatch
        if one_pass:
            known = {place: old.dense[row] for place, row in enumerate(rows) if row in old.dense}
            update_batch = make_one_pass_batch(
                rollouts,
                advantages_B,
                self.spec,
                config.loss,
                config.rollout.max_tokens,
                reference,
                device=learner.device,
                known=known,
            )
        else:
            update_batch = make_batch(
                rollouts,
                advantages_B,
                [old.learned[row] for row in rows],
                self._correct(batch, rows, old),
                config.loss,
                config.rollout.max_tokens,
                reference,
            )
        updated = update(
            learner,
            self.optimizer,
            step,
            update_batch,
            self.objective,
            self.world,
        )
        if isinstance(update_batch, OnePassBatch):
            for place, entropy in update_batch.entropies.items():
                old.dense[rows[place]] = update_batch.logprobs[place]
                old.entropies[rows[place]] = float(entropy)
        return updated

    def _now(self) -> float:
        return device_time(self.actor.learner.device)


def split_groups(groups: Sequence[RolloutGroup], updates: int) -> list[Sequence[RolloutGroup]]:
    """Split the groups, in order, into `updates` parts of nearly equal size."""
    edges = [round(number * len(groups) / updates) for number in range(updates + 1)]
    return [groups[start:stop] for start, stop in pairwise(edges)]
