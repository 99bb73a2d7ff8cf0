"""The training loop: sample, grade, ask the dense model, learn, write it down. Read it top to bottom.

A step in five lines: `Dealer.draw` gives groups of graded rollouts, `_old_logprobs` what the dense model says of them,
`correct` how far the sampler was off, `update` changes the weights, and the metrics say how it went.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SHADOW_METHODS, Config
from ..data.order import Order
from ..errors import RankLost, Unanswered, UserError
from ..learner.correction import correct
from ..learner.fusion import fused_layers
from ..learner.optimizer import Optimizer
from ..learner.replay import ReplayKind, logprobs_of, passes_of
from ..learner.update import Updated, make_batch, padded, response_mask, update
from ..models.actor import Actor
from ..models.export import write_model
from ..models.sharded import at_rest, with_weights
from ..monitor import ratios
from ..plan.output import compact
from ..report.live import LiveReport
from ..rewards.find import one_line
from ..rewards.pool import RewardPool, try_on_gold
from ..rollout.engine import Engine
from ..rollout.rollout import Rollout
from ..world import ALONE, World
from . import checkpoint, rollout_log
from . import resume as resuming
from .best import Best
from .held_out import Evaluator, load_held_out
from .inputs import RunInputs, load_all
from .loggers import Logger
from .memory import compared, peak_metrics, plan_run, slots_of
from .metrics import engine_noise, kv_metrics, policy_metrics, response_metrics, reward_metrics
from .rehearsal import rehearse
from .rollouts import Group, RolloutBatch, RolloutSampler, Sample
from .run_folder import RunFolder
from .stop import StopAsked
from .terminal import View

NOISE_ROLLOUTS = 8
"""Rollouts of a step that are replayed to measure engine noise, where the method does not replay them all."""
ENGINE_PARTS = ("prefill_s", "decode_s", "compaction_s")
SILENT_STEPS = 3
"""Steps in a row without any verdict after which a run ends."""
QUIET_STEPS = 5
"""Steps in a row without any signal after which the warning is repeated."""


class Trainer:
    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        view: View,
        pool: RewardPool,
        loggers: Sequence[Logger] = (),
        *,
        resume: bool = False,
        given: RunInputs | None = None,
        world: World = ALONE,
    ):
        self.config, self.folder, self.view, self.pool, self.loggers = config, folder, view, pool, loggers
        self.world = world
        torch.manual_seed(config.seed)  # of fresh adapters; all else is drawn by counter
        given = given or load_all(config)
        for note in given.notes:
            view.note(note)
        if warning := config.sampler_kv.remark(given.prompts, config.rollout.max_tokens):
            view.warn(warning)
        self.tokenizer = given.tokenizer
        self.report = LiveReport(folder.path, self.tokenizer, view.warn)
        device = given.model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        held_out = load_held_out(config, self.tokenizer, view)
        self.plan = plan_run(config, given.model, max(map(len, [*given.prompts, *held_out.prompts])))
        self.actor = Actor(given.model, config.model.lora, keep_reference=config.loss.kl_coef > 0, ranks=config.ranks)
        self.optimizer = Optimizer(self.actor.learner, config.optimizer, config.steps)
        self.engine = Engine(self.actor.sampler, config.sampler_kv, slots=slots_of(config, self.plan, device))
        order = Order(len(given.examples), config.seed).take
        self.rollout_sampler = RolloutSampler(
            config, given.examples, given.prompts, order, self.engine, self.tokenizer, self.pool, given.limits, world
        )
        self.longest_prompt = self._longest(given.prompts, config.data.train, given.places)
        if held_out.examples:
            self._longest(held_out.prompts, f"the test problems, {config.data.held_out},")
        self.engine.reserve(max(map(len, [self.longest_prompt, *held_out.prompts])) + config.rollout.max_tokens)
        self.evaluator = Evaluator(
            config, held_out, self.engine, self.actor.sampler, self.plan, self.tokenizer, pool, world, view
        )
        self.compared = False
        self.best = Best(config.checkpoint, view.warn)
        problems, scored_by = (
            resuming.problems_of(given.prompts),
            resuming.scored_by(config, given.examples, held_out.examples),
        )
        options = resuming.kept_options(config)
        self.state = checkpoint.State(ranks=world.size, problems=problems, scored_by=scored_by, config=options)
        last = None
        if resume:
            last = checkpoint.load_last(folder.checkpoints, self.actor, self.optimizer, world, folder.reached)
        if last is not None:
            self._go_on_from(last)
        elif resume and folder.reached:
            view.warn(checkpoint.STARTS_AGAIN)
        self.rollout_sampler.mean_tokens = self.state.mean_tokens
        folder.forget_after(self.state.step if last else -1, view.warn)
        if last is not None:
            view.recall(folder.read_metrics())

    def _go_on_from(self, last: checkpoint.Loaded) -> None:
        fresh, self.state = self.state, last.state
        step, steps = self.state.step, self.config.steps
        resuming.refuse_other_problems(self.config.data.train, self.state.problems, fresh.problems, step)
        self.best.saved(step)
        self.view.resume_at(step)
        if step > steps:
            raise UserError(f"{self.folder.name} is at step {step} already, past steps = {steps}: raise --steps.")
        for damaged in last.damaged:
            self.view.warn(f"{damaged} The run goes on from step {step}; the damaged one is set aside as damaged-step-N.")
        for late in last.unfinished:
            self.view.warn(checkpoint.UNFINISHED.format(step=late))
        if not last.verified:
            self.view.warn(checkpoint.UNVERIFIED.format(step=step))
        if other := resuming.other_score(self.state.scored_by, fresh.scored_by, step):
            self.view.warn(other)
            self.state.best_step, self.state.best_value = fresh.best_step, fresh.best_value
        changed = resuming.changes_since(f"the checkpoint of step {step}", self.state.config, fresh.config)
        for line in resuming.told(changed, step, self.config, self.optimizer.lr_at(step)):
            self.view.warn(line)
        self.folder.note_changes([each.until(step) for each in changed])
        self.state.problems, self.state.scored_by, self.state.config = fresh.problems, fresh.scored_by, fresh.config
        if self.world.is_main:
            checkpoint.set_aside(last.damaged)
        self.view.note(f"Continuing after step {step}.")

    # The run

    def run(self, stop: StopAsked) -> None:
        """To the last step, or until asked to stop; either way the last step done is in a checkpoint."""
        self._warn_of_a_small_disk()
        self._try_reward()
        self.rehearse()
        if self.state.step == 0:
            self._log(self._evaluate())
        stopping = self.world.any(stop.asked)
        while self.state.step < self.config.steps and not stopping:
            metrics = self.step()
            self.best.after_step(self.state, metrics)
            step, last = self.state.step, self.state.step == self.config.steps
            if last or (self.config.eval.every and step % self.config.eval.every == 0):
                try:
                    metrics |= self._evaluate()
                except Exception:
                    if self.world.size == 1 and not self.state.skipped_in_a_row:  # other ranks may be anywhere by now
                        with suppress(UserError):  # why the evaluation failed is what is told
                            self._log(metrics)
                            self._save(metrics, last=last)
                            self.view.note(f"The evaluation failed; step {step} is saved, and --resume goes on after it.")
                    raise
            self._log(metrics)
            self._end_if_broken()
            stopping = self.world.any(stop.asked)
            due = step % self.config.checkpoint.every == 0 and not self.state.skipped_in_a_row  # a good one is not pushed out
            if last or stopping or due:
                self._save(metrics, last=last)
        if self.state.step >= self.config.steps:
            self._write_model()
        if line := self.best.told(self.state):
            self.view.note(line)

    def _warn_of_a_small_disk(self) -> None:
        step, steps, settings = self.state.step, self.config.steps, self.config.checkpoint
        to_come = steps // settings.every - step // settings.every + bool(steps % settings.every)
        weights = self.optimizer.masters if self.actor.peft else list(self.actor.sampler.parameters())
        model = sum(weight.numel() * weight.element_size() for weight in weights)
        each = checkpoint.bytes_of(self.optimizer)
        if warning := checkpoint.lack_of_room(self.folder.checkpoints, each, model, to_come, settings.keep):
            self.view.warn(warning)

    def _try_reward(self) -> None:
        """Before any rollout is sampled for it. A run that continues has seen the reward work, and goes on."""
        tried = self.world.gather(try_on_gold(self.pool, self.rollout_sampler.examples[0], self.tokenizer))
        if failed := next((each for each in tried if each.fault), None):
            if self.state.step == 0 and failed.gold is not None:
                raise UserError(failed.sentence)
            self.view.warn(failed.sentence)

    def rehearse(self) -> None:
        """Say what memory is expected to go where, and try the sampler and the fullest micro-batch."""
        for line in compact(self.plan) if self.plan is not None else ():
            self.view.note(line)
        rehearse(self.engine, self.actor.learner, self.optimizer, self.longest_prompt, self.config, self.plan)

    # A step, top to bottom

    def step(self) -> dict[str, float]:
        config, shadow = self.config, self.config.method in SHADOW_METHODS
        device = self.actor.learner.device
        started = now(device)
        with self.view.sampling(self.state.step + 1) as progress:
            drawn = self.rollout_sampler.draw(self.state.cursor, progress)
        self._end_if_silent(drawn)
        samples = drawn.samples
        spread = range(0, len(samples), max(1, len(samples) // NOISE_ROLLOUTS))[:NOISE_ROLLOUTS]
        drawn.share_traces(range(len(samples)) if shadow else spread, self.world)
        rollouts = [sample.rollout for sample in samples]
        rollout_s = now(device) - started

        with self.view.learning(self.state.step + 1):
            old, entropy = self._old_logprobs(self.actor.learner, rollouts, "dense")
            learned_old, noise = old, self._noise(rollouts, spread, old)
            if shadow:
                learned_old, _ = self._old_logprobs(self.actor.learner, rollouts, "sparse")
                noise = engine_noise(rollouts, learned_old)
            reference = None
            if config.loss.kl_coef > 0:
                with self.actor.reference() as model:
                    reference, _ = self._old_logprobs(model, rollouts, "sparse" if shadow else "dense")
            mismatch = self._correct(samples, old)
            old_s = now(device) - started - rollout_s
            row_of = {id(sample): row for row, sample in enumerate(samples)}
            updates = [
                self._update(part, row_of, old, learned_old, reference)
                for part in deal(self.rollout_sampler.learnable(drawn), config.optimizer.updates_per_step)
            ]
            update_s = now(device) - started - rollout_s - old_s
            self.actor.sync()
        learner_s = now(device) - started - rollout_s

        self.state.step += 1
        self.state.cursor += drawn.prompts
        self._watch(drawn, updates)
        tokens = sum(len(rollout.response) for rollout in rollouts)
        passed = sum(len(rollout.prompt) + len(rollout.response) for rollout in rollouts)
        rejected = mismatch.rejected.tolist()
        drawn.share_traces(
            rollout_log.logged(rejected, config.log.rollouts_per_step)[: config.log.traces_per_step], self.world
        )
        if self.world.is_main:
            with self.folder.writing():
                rollout_log.write(
                    self.folder.rollouts / f"step-{self.state.step}.parquet",
                    self.state.step,
                    drawn.groups,
                    rejected,
                    old,
                    rollouts=config.log.rollouts_per_step,
                    traces=config.log.traces_per_step,
                )
        sampled = torch.cat([rollout.logprobs for rollout in rollouts]).to(old[0].device)
        self.folder.append_xi(self.state.step, ratios.count(torch.cat(old) - sampled))
        memory = peak_metrics(self.plan, device)
        if self.plan is not None and not self.compared:
            self.compared = True
            self.view.note(compared(memory))
        return {
            **reward_metrics(drawn),
            **mismatch.metrics,
            "sparse/engine_noise": noise,
            **kv_metrics(drawn, self.engine),
            **policy_metrics(updates, tokens, entropy, self.optimizer.lr_at(self.state.step - 1)),
            **response_metrics(rollouts),
            "perf/step_s": now(device) - started,
            "perf/rollout_s": rollout_s,
            **{f"perf/{name}": sum(getattr(each, name) for each in drawn.stats) for name in ENGINE_PARTS},
            "perf/grade_s": drawn.grade_s,
            **({"perf/rank_wait": drawn.waited_s / drawn.sampled_s} if self.world.size > 1 else {}),
            "perf/learner_s": learner_s,
            "perf/old_logprobs_s": old_s,
            "perf/update_s": update_s,
            "perf/rollout_tokens_per_s": tokens / rollout_s,
            "perf/learner_tokens_per_s": passed / learner_s,
            **memory,
        }

    @torch.no_grad()
    def _old_logprobs(
        self, model: PreTrainedModel, rollouts: Sequence[Rollout], view: ReplayKind
    ) -> tuple[list[Tensor], float]:
        """(log-probs of every response token, mean entropy) under the weights as they are."""
        rows: dict[int, Tensor] = {}
        entropy = 0.0
        for indices in passes_of(rollouts, self.config.optimizer.tokens_per_microbatch, self.world):
            pack = [rollouts[index] for index in indices or [0]]  # where other ranks have rows for their pass, any will do
            with fused_layers(model):
                logprobs_n, entropy_n = with_weights(model, logprobs_of, pack, view)
            if indices:
                rows |= zip(indices, logprobs_n.split([len(rollout.response) for rollout in pack]), strict=True)
                entropy += float(entropy_n.sum())
        at_rest(model)
        if self.world.size > 1:
            device = next(iter(rows.values())).device if rows else self.actor.learner.device
            parts = self.world.gather(({row: logprobs.cpu() for row, logprobs in rows.items()}, entropy))
            rows = {row: logprobs.to(device) for part, _ in parts for row, logprobs in part.items()}
            entropy = sum(part for _, part in parts)
        return [rows[row] for row in range(len(rollouts))], entropy / sum(len(rollout.response) for rollout in rollouts)

    @torch.no_grad()
    def _noise(self, rollouts: Sequence[Rollout], rows: Sequence[int], dense: Sequence[Tensor]) -> float:
        """On a few rollouts spread over the step; without evictions the dense pass is the replay already."""
        if not self.engine.policy.evicts:
            return engine_noise(rollouts, dense)
        few = [rollouts[row] for row in rows]
        return engine_noise(few, self._old_logprobs(self.actor.learner, few, "sparse")[0])

    def _correct(self, samples: Sequence[Sample], old: Sequence[Tensor], *, on_policy: bool = False):
        """xi = pi_old / pi_sampler of these samples, and what the method does about it. Learning on the sampler's own view
        there is nothing to correct."""
        rollouts = [sample.rollout for sample in samples]
        mask_BT = response_mask(rollouts).to(old[0].device)
        log_xi_BT = padded(old) - padded([rollout.logprobs for rollout in rollouts]).to(old[0].device)
        point = self.config.correction.point(self.config.default_preset)
        return correct(log_xi_BT * 0 if on_policy else log_xi_BT, mask_BT, point)  # what is not finite stays so

    def _update(self, groups: Sequence[Group], row_of: dict[int, int], old, learned_old, reference) -> Updated:
        config, shadow = self.config, self.config.method in SHADOW_METHODS
        samples = [sample for group in groups for sample in group.samples if sample.in_loss]
        if not samples:
            return Updated({}, 0.0, learned=False, finite=True)
        rows = [row_of[id(sample)] for sample in samples]
        seen = [old[row] + 0 * learned_old[row] for row in rows]  # not finite where either is
        batch = make_batch(
            [sample.rollout for sample in samples],
            torch.tensor([sample.advantage for sample in samples], dtype=old[0].dtype),
            [learned_old[row] for row in rows],
            self._correct(samples, seen, on_policy=shadow),
            config.loss,
            config.rollout.max_tokens,
            None if reference is None else [reference[row] for row in rows],
        )
        return update(
            self.actor.learner,
            self.optimizer,
            self.state.step,
            batch,
            config.loss,
            view="sparse" if shadow else "dense",
            smd=config.loss.smd if config.method == "smd" else None,
            opsm_delta=config.correction.opsm,
            world=self.world,
        )

    # What goes wrong

    def _watch(self, drawn: RolloutBatch, updates: Sequence[Updated]) -> None:
        """Warn about a step that taught nothing."""
        state, step = self.state, self.state.step
        broken = sum(not each.finite for each in updates)
        for each in updates:
            if each.learned or not each.finite:
                state.skipped_in_a_row = 0 if each.learned else state.skipped_in_a_row + 1
        state.skipped_updates += sum(not each.learned for each in updates)
        if broken:
            self.view.warn(
                f"Step {step}: loss or gradient was not finite in {broken} of {len(updates)} updates; they were skipped."
            )
        quiet = not any(group.has_signal for group in drawn.groups)
        state.quiet_steps = state.quiet_steps + 1 if quiet else 0
        if state.quiet_steps == 1 or (state.quiet_steps and state.quiet_steps % QUIET_STEPS == 0):
            since = f" for {state.quiet_steps} steps" if state.quiet_steps > 1 else ""
            what = "no group had two different rewards"
            why = "the problems are too easy or too hard, or the reward does not tell answers apart"
            if missing := drawn.failures:
                why = f"{missing} of {len(drawn.samples)} rollouts got no verdict"
            elif cut := drawn.counts["truncated"]:
                why = f"{cut} of {len(drawn.samples)} rollouts were cut off and not graded; raise rollout.max_tokens"
            elif not all(group.no_signal for group in drawn.groups):
                what = "every answer that could teach was cut off"
                why = "advantage.mask_truncated leaves them out; raise rollout.max_tokens"
            learned = any(each.learned for each in updates)  # from lengths, where advantage.overlong penalises them
            then = "so only their lengths are learned from" if learned else "so nothing is learned"
            self.view.warn(f"Step {step}: {what}{since}, {then}: {why}.")
        elif not quiet and not broken and not any(each.learned for each in updates):
            self.view.warn(f"Step {step}: every sequence with a signal was rejected, so nothing was learned: raise kv.budget.")
        for remark in drawn.remarks(self.config.reward):
            self.view.warn(f"Step {step}: {remark}.")

    def _end_if_broken(self) -> None:
        skipped = self.state.skipped_in_a_row
        if skipped >= self.config.optimizer.max_skipped_updates:
            last = checkpoint.latest(self.folder.checkpoints)
            raise UserError(
                f"{skipped} updates in a row were not finite: lower optimizer.lr or the coefficients of the loss; "
                f"{f'the last good checkpoint is {last}' if last else 'there is no checkpoint yet'}."
            )

    def _end_if_silent(self, drawn: RolloutBatch) -> None:
        """A reward that never says anything is a mistake; one that falls silent may come back."""
        state = self.state
        state.silent_steps = state.silent_steps + 1 if drawn.silent else 0
        if drawn.silent and (state.step == 0 or state.silent_steps >= SILENT_STEPS):
            last = checkpoint.latest(self.folder.checkpoints)
            remedy = f"mend reward.function{f' and continue from {last} with --resume' if last else ''}"
            raise UserError(f"{drawn.silent}: {remedy}.")

    def _longest(self, prompts: list[list[int]], source: str, places: Sequence[int] = ()) -> list[int]:
        """The longest prompt, which must leave room for a response. Training problems, which have places, may be left out."""
        at, longest = max(enumerate(prompts), key=lambda pair: len(pair[1]))
        sampling = self.config.rollout.sampling(self.config.seed)
        try:
            self.engine.check_prompt(longest, sampling)
        except UserError as error:
            told = str(error).replace("Prompt 0", f"Problem {(places[at] if places else at) + 1} of {source}")
            most = self.engine.most_prompt_tokens(sampling)
            if places and min(map(len, prompts)) <= most < len(longest):
                longer = f"{sum(len(prompt) > most for prompt in prompts):,} of {len(prompts):,} problems"
                told = f"{told.removesuffix('.')}, or leave {longer} out with --data.max-prompt-tokens {most}."
            raise UserError(told) from None
        return longest

    # Evaluation, logs, checkpoints

    def _evaluate(self) -> dict[str, float]:
        return self.evaluator.evaluate()

    def _log(self, metrics: dict[str, float]) -> None:
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        self.folder.append_metrics(self.state.step, finite)
        for logger in self.loggers:
            try:
                logger.log(self.state.step, finite)
            except Exception as error:  # whatever a service does, the run goes on
                self.view.warn(f"{type(logger).__name__} took no metrics of step {self.state.step} ({one_line(error)}).")
        self.view.step(self.state.step, metrics)
        if self.world.is_main:
            self.report.refresh()
        if self.folder.push_is_due:
            self.folder.push_or_warn(self.view.warn)

    def _write_model(self) -> None:
        if self.world.is_main:
            write_model(self.folder.model, self.actor, self.tokenizer, self.config.sampler_kv)

    def _save(self, metrics: dict[str, float], *, last: bool) -> None:
        self.best.before_save(self.state, metrics, last=last)
        self.folder.push_or_warn(
            self.view.warn
        )  # first: what comes after a checkpoint is dropped when a run continues from it
        try:
            checkpoint.save(self.folder.checkpoints, self.state, self.optimizer, self.world)
        except UserError as error:
            on_disk = not isinstance(error, RankLost | Unanswered)
            if last and on_disk and self.world.is_main:  # the model is smaller, and what the run was for
                with suppress(UserError):
                    self._write_model()
                    self.view.note(f"The trained model is in {self.folder.model}; its last checkpoint was not written.")
            raise
        self.best.saved(self.state.step)
        if self.world.is_main:
            try:
                checkpoint.prune(self.folder.checkpoints, self.config.checkpoint.keep, self.state.best_step, self.view.warn)
            except UserError as error:  # storage that does not answer for a while
                self.view.warn(str(error))


def now(device: torch.device) -> float:
    """The clock, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def deal(groups: Sequence[Group], updates: int) -> list[Sequence[Group]]:
    """Whole groups, in order, as evenly as they go."""
    edges = [round(number * len(groups) / updates) for number in range(updates + 1)]
    return [groups[start:stop] for start, stop in pairwise(edges)]
