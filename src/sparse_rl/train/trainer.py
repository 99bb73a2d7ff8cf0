"""The trainer: set up or resume a run, run its steps, evaluate, log and save. `step.py` implements one step."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import KV, Config
from ..data.order import Order
from ..errors import RankLost, StorageUnavailable, UserError
from ..host_memory import machine_bytes
from ..learner.optimizer import Optimizer
from ..models.actor import Actor
from ..models.export import write_model
from ..monitor import ratios
from ..plan.host import host_plan
from ..plan.output import compact
from ..report.live import LiveReport
from ..rewards.find import one_line
from ..rewards.gold import try_on_gold
from ..rewards.pool import RewardPool
from ..rollout import calibrate
from ..rollout.clock import device_time
from ..rollout.engine import Engine
from ..world import ALONE, World
from . import checkpoint, checkpoint_folder, rollout_log
from . import resume as resuming
from .auto_budget import AutoBudget
from .best import Best
from .card import model_card
from .health import Health
from .held_out import Evaluator
from .inputs import HeldOut, RunInputs, check_longest, load_all
from .loggers import Logger
from .memory import (
    checkpointed_layers,
    peak_line,
    peak_metrics,
    plan_budget,
    plan_run,
    possible_budgets,
    reserve_step,
    slots_of,
)
from .preflight import preflight
from .probe import probe
from .rollouts import RolloutSampler
from .run_folder import RunFolder
from .step import StepResult, TrainingStep
from .stop import StopHandler
from .terminal import RunTerminal


class TrainingRun:
    """One run: builds the actor, the engine and the optimizer, resumes if asked to, and trains with `run`."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        terminal: RunTerminal,
        pool: RewardPool,
        loggers: Sequence[Logger] = (),
        *,
        resume: bool = False,
        inputs: RunInputs | None = None,
        world: World = ALONE,
        callback: Callable[[int, dict[str, float]], Any] | None = None,
    ):
        self.config, self.folder, self.terminal, self.pool, self.loggers = config, folder, terminal, pool, loggers
        self.world, self.callback = world, callback
        torch.manual_seed(config.seed)  # only adapter initialization uses it; all other randomness is derived from counters
        inputs = inputs or load_all(config)
        self._show_notes(inputs)
        self.tokenizer = inputs.tokenizer
        self.report = LiveReport(folder.path, self.tokenizer, terminal.warn)
        self.best = Best(config.checkpoint, terminal.warn)
        self.peak_shown = False
        """True once the memory peak of the first step has been printed."""
        kv, budgets = self._plan_memory(inputs)
        self._build_actor(inputs.model)
        self._build_sampler(inputs, kv)
        self._build_evaluator(inputs.held_out)
        self._build_auto_budget(budgets)
        self.training_step = TrainingStep(config, self.rollout_sampler, self.engine, self.actor, self.optimizer, world)
        self._resume_or_start(inputs, resume=resume)

    # Setup, in the order of these methods

    def _show_notes(self, inputs: RunInputs) -> None:
        """Print the notes about the data, and the warning about a cache that does not suit them."""
        for note in inputs.notes:
            self.terminal.note(note)
        if warning := self.config.cache_warning(inputs.prompts):
            self.terminal.warn(warning)

    def _plan_memory(self, inputs: RunInputs) -> tuple[KV, list[int]]:
        """Plan the memory of the run. Return the sampler's KV settings, and the budgets that `kv.budget = auto` may choose;
        empty if the budget is fixed."""
        config, device = self.config, inputs.model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        evaluated = [prompt for held_out in inputs.held_out for prompt in held_out.prompts]
        self.most_prompt_tokens = max(map(len, [*inputs.prompts, *evaluated]))
        """Tokens of the longest prompt of training and evaluation."""
        self.plan = plan_run(config, inputs.model, self.most_prompt_tokens)
        if not config.sets_budget:
            return config.sampler_kv, []
        budgets, start = possible_budgets(config, self.plan, self.most_prompt_tokens, self.world)
        self.plan = self.plan and plan_budget(config, self.plan, start)
        return config.with_budget(start).kv, budgets

    def _build_actor(self, model: PreTrainedModel) -> None:
        """Build the actor and its optimizer."""
        config = self.config
        self.actor = Actor(model, config.model.lora, keep_reference=config.loss.kl_coef > 0, ranks=config.ranks)
        layers = checkpointed_layers(config, self.plan, self.actor.learner)
        layers = max(self.world.gather(layers))  # FSDP runs layers together
        self.optimizer = Optimizer(self.actor.learner, config.optimizer, config.steps, checkpointed_layers=layers)

    def _build_sampler(self, inputs: RunInputs, kv: KV) -> None:
        """Build the engine and the rollout sampler, and allocate the memory of a step. Raise PromptError if a prompt is too
        long."""
        config, sampling = self.config, self.config.rollout.sampling(self.config.seed)
        self.engine = Engine(self.actor.sampler, kv, slots=slots_of(config, self.plan, self.actor.learner.device))
        order = Order(len(inputs.examples), config.seed).take
        self.rollout_sampler = RolloutSampler(
            config, inputs.examples, inputs.prompts, order, self.engine, self.tokenizer, self.pool, inputs.limits, self.world
        )
        check_longest(self.engine, sampling, inputs.prompts, config.data.train, inputs.places)
        for held_out in inputs.held_out:
            check_longest(self.engine, sampling, held_out.prompts, f"the test problems, {held_out.source},")
        self.longest_prompt_ids = max(inputs.prompts, key=len)
        reserve_step(self.engine, config, self.plan, self.most_prompt_tokens)

    def _build_evaluator(self, sets: Sequence[HeldOut]) -> None:
        self.evaluator = Evaluator(
            self.config, sets, self.engine, self.actor, self.plan, self.tokenizer, self.pool, self.world, self.terminal
        )
        if remark := self.evaluator.remark():
            self.terminal.note(remark)

    def _build_auto_budget(self, budgets: list[int]) -> None:
        """Build the controller of `kv.budget = auto`. `budgets` is empty if the budget is fixed."""
        self.auto_budget = None
        if budgets:
            self.auto_budget = AutoBudget(
                self.config,
                budgets,
                plan=self.plan,
                engine=self.engine,
                actor=self.actor,
                optimizer=self.optimizer,
                longest_prompt_ids=self.longest_prompt_ids,
                most_prompt_tokens=self.most_prompt_tokens,
                folder=self.folder,
                terminal=self.terminal,
                world=self.world,
            )

    def _resume_or_start(self, inputs: RunInputs, *, resume: bool) -> None:
        """Continue from the last checkpoint with `resume`, if there is one; else start at step 0."""
        config, folder, warn = self.config, self.folder, self.terminal.warn
        self.state = checkpoint.State(
            ranks=self.world.size,
            problems=resuming.problem_digest(inputs.prompts),
            scored_by=resuming.scored_by(config, inputs.examples, {each.source: each.examples for each in inputs.held_out}),
            config=resuming.kept_options(config),
        )
        last = self._load_last() if resume else None
        self._load_statistics(last, inputs.prompts)
        self.rollout_sampler.mean_tokens = self.state.mean_tokens
        self.health = Health(config, self.state, folder.checkpoints, warn)
        budgets_so_far = self.auto_budget.changes if self.auto_budget else []
        folder.drop_rows_after(self.state.step if last else -1, warn, budgets_so_far)
        if last is not None:
            self.terminal.replay_rows(folder.read_metrics())

    def _load_last(self) -> checkpoint.LoadedCheckpoint | None:
        """Continue from the last checkpoint. Return None if there is none yet."""
        folder = self.folder
        last = checkpoint.load_last(folder.checkpoints, self.actor, self.optimizer, self.world, folder.last_step)
        if last is not None:
            self._resume_from(last)
            if self.auto_budget:
                self.auto_budget.restore(self.state.budget, self.state.step)
                self._use_budget()
        elif folder.last_step:
            self.terminal.warn(checkpoint.STARTS_AGAIN)
        return last

    def _load_statistics(self, last: checkpoint.LoadedCheckpoint | None, prompts: list[list[int]]) -> None:
        """Use the statistics of the checkpoint. If it has none, gather them from the prompts."""
        self.engine.load_statistics({} if last is None else last.statistics)
        if self.engine.needed_statistics and last is not None and not last.statistics:
            self.terminal.warn(
                f"The checkpoint of step {self.state.step} has no statistics of queries or keys: they are gathered again from "
                "the prompts, and the run continues with slightly different ones."
            )
        if not self.engine.statistics:
            self._calibrate(prompts)

    def _resume_from(self, last: checkpoint.LoadedCheckpoint) -> None:
        fresh, self.state = self.state, last.state
        step, steps = self.state.step, self.config.steps
        resuming.refuse_other_problems(self.config.data.train, self.state.problems, fresh.problems, step)
        self.best.saved(step)
        self.terminal.resume_at(step)
        if step > steps:
            raise UserError(f"{self.folder.name} is already at step {step}, beyond steps = {steps}: raise --steps.")
        for damaged in last.damaged:
            self.terminal.warn(
                f"{damaged} The run continues from step {step}; the damaged checkpoint is renamed to damaged-step-N."
            )
        for late in last.unfinished:
            self.terminal.warn(checkpoint.UNFINISHED.format(step=late))
        if not last.verified:
            self.terminal.warn(checkpoint.UNVERIFIED.format(step=step))
        if other := resuming.other_score(self.state.scored_by, fresh.scored_by, step):
            self.terminal.warn(other)
            self.state.best_step, self.state.best_value = fresh.best_step, fresh.best_value
        changed = resuming.changes_since(f"the checkpoint of step {step}", self.state.config, fresh.config)
        for line in resuming.change_notes(changed, step, self.config, self.optimizer.lr_at(step)):
            self.terminal.warn(line)
        self.folder.note_changes([each.until(step) for each in changed])
        self.state.problems, self.state.scored_by, self.state.config = fresh.problems, fresh.scored_by, fresh.config
        if self.world.is_main:
            checkpoint_folder.rename_damaged(last.damaged)
        self.terminal.note(f"Continuing after step {step}.")

    def _use_budget(self) -> None:
        """Use the plan of the budget that `auto_budget` has chosen, and put the budget into the state that checkpoints store."""
        assert self.auto_budget is not None
        self.plan, self.state.budget = self.auto_budget.plan, self.auto_budget.stored()
        self.evaluator = replace(self.evaluator, plan=self.plan)

    def _calibrate(self, texts: Sequence[Sequence[int]]) -> None:
        """Gather the statistics that the cache or the policy needs, on all ranks together."""
        if self.engine.needed_statistics:
            self.actor.merge()
            self.engine.calibrate(texts, len(self.longest_prompt_ids) + self.config.rollout.max_tokens, self.world)

    def _check_quantised_cache(self) -> None:
        """Measure the mismatch of a quantised cache. Warn if it is large, and refuse it if it ruins the model."""
        if not self.engine.kv.quantised:
            return
        self.actor.merge()
        rollout, prompts = self.config.rollout, self.rollout_sampler.prompts
        inputs = (self.engine, self.actor.sampler, prompts, rollout.sampling(self.config.seed))
        found = probe(*inputs, most=rollout.prompts_per_step, samples=rollout.samples_per_prompt)
        found = self.world.gather(found)[0]  # ranks must agree
        if warning := found.warning():
            self.terminal.warn(warning)
        else:
            self.terminal.note(f"{found.sentence}.")

    # Training loop

    def run(self, stop: StopHandler) -> None:
        """Train to the last step, or until the user stops the run. In both cases, save a checkpoint of the last finished step."""
        self._warn_if_disk_is_small()
        self._try_reward()
        self.check_memory()
        if self.state.step == 0:
            self._check_quantised_cache()
            if self.auto_budget:
                self.auto_budget.probe(self.rollout_sampler.prompts)
                self._use_budget()
            self._log(self.evaluator.evaluate())
        stopping = self.world.any(stop.requested)
        while self.state.step < self.config.steps and not stopping:
            metrics = self.step()
            self.best.after_step(self.state, metrics)
            metrics |= self._evaluate_or_save(metrics)
            self._log(metrics)
            self.health.stop_if_not_finite()
            self.health.stop_if_refill_fails()
            stopping = self.world.any(self._asked_to_stop(metrics) or stop.requested)
            if stopping or self._at_last_step or self._save_is_due():
                self._save(metrics)
        if self.state.step >= self.config.steps:
            self._write_model()
        if line := self.best.summary_line(self.state):
            self.terminal.note(line)

    @property
    def _at_last_step(self) -> bool:
        return self.state.step == self.config.steps

    def _evaluate_or_save(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the held-out metrics if an evaluation follows this step. If it fails, log and save the step, then raise."""
        if not self.config.evaluates_after(self.state.step):
            return {}
        try:
            return self.evaluator.evaluate()
        except Exception:
            if self.world.size == 1 and not self.state.skipped_in_a_row:  # a save needs all ranks, and others may not reach it
                with suppress(UserError):  # raise the error of the evaluation, not of the save
                    self._log(metrics)
                    self._save(metrics)
                    self.terminal.note(f"The evaluation failed. Step {self.state.step} is saved: continue with --resume.")
            raise

    def _asked_to_stop(self, metrics: dict[str, float]) -> bool:
        """Call the user's callback on the main rank and return whether it asks to end the run."""
        return self.callback is not None and self.world.is_main and self.callback(self.state.step, dict(metrics)) is True

    def _save_is_due(self) -> bool:
        """Return whether a periodic save is due. It waits after a skipped update, to keep an older, good checkpoint."""
        return self.state.step % self.config.checkpoint.every == 0 and not self.state.skipped_in_a_row

    def _warn_if_disk_is_small(self) -> None:
        step, steps, settings = self.state.step, self.config.steps, self.config.checkpoint
        to_come = steps // settings.every - step // settings.every + bool(steps % settings.every)
        weights = self.optimizer.masters if self.actor.peft else list(self.actor.sampler.parameters())
        model_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        sizes = checkpoint.bytes_of(self.optimizer), model_bytes
        if warning := checkpoint_folder.disk_warning(self.folder.checkpoints, *sizes, to_come, settings.keep):
            self.terminal.warn(warning)

    def _try_reward(self) -> None:
        """Grade the reference answer of the first problem before sampling. Raise UserError if the reward fails.

        Only warn in a resumed run, or if the problem has no reference answer.
        """
        tried = self.world.gather(try_on_gold(self.pool, self.rollout_sampler.examples[0], self.tokenizer))
        if failed := next((each for each in tried if each.fault), None):
            if self.state.step == 0 and failed.gold is not None:
                raise UserError(failed.sentence)
            self.terminal.warn(failed.sentence)

    def check_memory(self) -> None:
        """Print the planned memory, then run the sampler and the largest micro-batch once to detect out-of-memory errors."""
        if self.plan is not None:
            host = host_plan(self.plan, machine_bytes())
            for line in (*compact(self.plan), host.line):
                self.terminal.note(line)
            if host.warning:
                self.terminal.warn(host.warning)
        preflight(self.engine, self.actor.learner, self.optimizer, self.longest_prompt_ids, self.config, self.plan)

    def step(self) -> dict[str, float]:
        """Run one training step and return its metrics."""
        device = self.actor.learner.device
        started = device_time(device)
        with self.terminal.sampling(self.state.step + 1) as progress:
            batch = self.training_step.sample(self.state.cursor, progress)
        self.health.stop_if_no_verdicts(batch)
        batch.share_traces(self.world)
        rollout_s = device_time(device) - started - batch.old_logprobs_s
        with self.terminal.learning(self.state.step + 1):
            result = self.training_step.learn(self.state.step, batch)
        self.state.step += 1
        self.state.cursor += batch.prompts
        if calibrate.is_due(self.state.step):
            self._calibrate([sample.rollout.prompt + sample.rollout.response for sample in batch.samples])
        self.health.after_step(batch, result.updates)
        self._write_rollouts(result)
        memory = self._memory_metrics()
        metrics = self.training_step.metrics(self.state.step - 1, result, rollout_s)
        if self.auto_budget:  # also after the last step: the run may be continued
            metrics |= self.auto_budget.after_step(self.state.step, result, metrics)
            self._use_budget()
        return {**metrics, **memory, "perf/step_s": device_time(device) - started}

    def _write_rollouts(self, result: StepResult) -> None:
        """Store some rollouts of the step and the histogram of its ratios."""
        log, rows, samples = self.config.log, list(result.row_weights), result.batch.samples
        rejected, dense = result.corrected.rejected.tolist(), [result.old.dense[row] for row in rows]
        if self.world.is_main:
            with self.folder.writing():
                rollout_log.write(
                    self.folder.rollouts / f"step-{self.state.step}.parquet",
                    self.state.step,
                    [samples[row] for row in rows],
                    rejected,
                    dense,
                    tokenizer=self.tokenizer,
                    rollouts=log.rollouts_per_step,
                    traces=log.traces_per_step,
                )
        stands_for = torch.tensor(list(result.row_weights.values())).repeat_interleave(torch.tensor(list(map(len, dense))))
        self.folder.append_xi(self.state.step, ratios.count(torch.cat(list(result.log_xi.values())), stands_for))

    def _memory_metrics(self) -> dict[str, float]:
        memory = peak_metrics(self.plan, self.actor.learner.device)
        if self.plan is not None and not self.peak_shown:
            self.peak_shown = True
            self.terminal.note(peak_line(memory))
        return memory

    # Logs and checkpoints

    def _log(self, metrics: dict[str, float]) -> None:
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        self.folder.append_metrics(self.state.step, finite)
        for logger in self.loggers:
            try:
                logger.log(self.state.step, finite)
            except Exception as error:  # a failing logging service must not end the run
                self.terminal.warn(
                    f"{type(logger).__name__} did not log the metrics of step {self.state.step} ({one_line(error)})."
                )
        self.terminal.step(self.state.step, metrics)
        if self.world.is_main:
            self.report.refresh()
        if self.folder.push_is_due:
            self.folder.push_or_warn(self.terminal.warn)

    def _write_model(self) -> None:
        if self.world.is_main:
            kv, name = self.engine.kv, f"{self.folder.path.resolve().name}/model"
            card = model_card(self.config, kv, self.folder.read_metrics(), self.state.step, name)
            write_model(self.folder.model, self.actor, self.tokenizer, kv, self.engine.statistics, card=card)

    def _save(self, metrics: dict[str, float]) -> None:
        last = self._at_last_step
        self.best.before_save(self.state, metrics, last=last)
        self.folder.push_or_warn(self.terminal.warn)  # push first: storage must have the logs up to the checkpoint
        try:
            checkpoint.save(self.folder.checkpoints, self.state, self.optimizer, self.world, self.engine.statistics)
        except UserError as error:
            on_disk = not isinstance(error, RankLost | StorageUnavailable)
            if last and on_disk and self.world.is_main:  # the model is smaller than a checkpoint and may fit
                with suppress(UserError):
                    self._write_model()
                    self.terminal.note(f"The trained model is in {self.folder.model}; the last checkpoint was not written.")
            raise
        self.best.saved(self.state.step)
        if self.world.is_main:
            try:
                checkpoint_folder.prune(
                    self.folder.checkpoints, self.config.checkpoint.keep, self.state.best_step, self.terminal.warn
                )
            except UserError as error:  # a temporary outage of the storage
                self.terminal.warn(str(error))
