"""Run `kv.budget = "auto"`: probe before the first step, then follow the controller and rebuild the cache between steps."""

from collections.abc import Sequence
from typing import Any

import torch

from ..config import Config
from ..errors import UserError
from ..format import counted, size
from ..learner.optimizer import Optimizer
from ..models.actor import Actor
from ..monitor.budget import MOST_CHANGES, BudgetState, Failed, Figures, Targets, decide, smallest
from ..plan import Plan
from ..rollout.clock import device_time
from ..rollout.engine import Engine
from ..world import World
from .budget_probe import ProbeRow, probe_budget, probe_table, remedy, unreachable
from .memory import checkpointed_layers, out_of_memory, plan_budget, reserve_step, slots_of
from .preflight import try_sampler
from .run_folder import RunFolder
from .step import StepResult
from .terminal import RunTerminal


class AutoBudget:
    """Sets the budget of a run. All ranks decide from the same figures, so they always have the same budget."""

    def __init__(
        self,
        config: Config,
        budgets: Sequence[int],
        *,
        plan: Plan | None,
        engine: Engine,
        actor: Actor,
        optimizer: Optimizer,
        longest_prompt_ids: list[int],
        most_prompt_tokens: int,
        folder: RunFolder,
        terminal: RunTerminal,
        world: World,
    ):
        """Set up the controller. `budgets` are those that fit, in ascending order. `longest_prompt_ids` is the longest training
        prompt, `most_prompt_tokens` the length of the longest prompt of the run and its evaluations."""
        self.config, self.budgets, self.plan = config, list(budgets), plan
        self.engine, self.actor, self.optimizer = engine, actor, optimizer
        self.longest_prompt_ids, self.most_prompt_tokens = longest_prompt_ids, most_prompt_tokens
        self.folder, self.terminal, self.world = folder, terminal, world
        self.spec = config.correction_spec
        self.targets = Targets.of(config.kv, config.alerts, self.spec)
        self.state = BudgetState(engine.kv.kept_tokens)
        self.changes: list[dict[str, Any]] = []
        """Step, budgets before and after, and reason of each change so far."""

    # Checkpoints

    def stored(self) -> dict[str, Any]:
        return {"state": self.state.as_json(), "changes": self.changes[-MOST_CHANGES:]}

    def restore(self, stored: dict[str, Any], step: int) -> None:
        """Continue with the state of a checkpoint."""
        try:
            state, self.changes = BudgetState.from_json(stored["state"]), list(stored["changes"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The checkpoint of step {step} has no valid budget for kv.budget = auto: set kv.budget to a number in a new run."
            ) from error
        wanted = min(state.budget, self.budgets[-1])
        smaller = [budget for budget in reversed(self.budgets) if budget < wanted]
        for largest in (wanted, *smaller, self.engine.kv.kept_tokens):  # last, the current budget
            if (seconds := self._resize(largest)) is not None:
                break
        if largest != wanted:  # the plan was too optimistic
            self.budgets = [budget for budget in self.budgets if budget <= largest]
        self.state = state if largest == state.budget else BudgetState(largest, state.tokens)
        if largest < state.budget:
            self._note(step, state.budget, f"only {largest:,} tokens fit in the memory of this machine", seconds or 0.0)

    # Before the first step

    def probe(self, prompts: Sequence[Sequence[int]]) -> None:
        """Use the smallest budget that meets the targets, and print the measurements. Raise UserError if none does."""
        self.actor.merge()
        measured: dict[int, ProbeRow] = {}

        def meets(budget: int) -> bool | None:
            row = self._measured(prompts, budget)
            if row is None:
                return None
            measured[budget] = row
            return self.targets.met_by(row.figures)

        best = smallest(self.budgets, meets)
        found, rows = measured.get(best or 0), [measured[budget] for budget in sorted(measured)]
        if not rows:
            raise out_of_memory(self.config, self.plan)
        self.terminal.table(probe_table(rows, self.targets, found.budget if found else None))
        if found is None:
            raise unreachable(rows[-1], self.targets, self.config.kv, memory_limits=self._memory_limits)
        seconds = self._resize(found.budget) or 0.0
        missed = [Failed(row.budget, row.figures.tokens) for row in rows if row.budget < found.budget]
        self.state = BudgetState(found.budget, found.figures.tokens, failed=missed[-1] if missed else None)
        share = f"{found.figures.rejected:.1%} of {found.figures.rollouts} probed rollouts {self.targets.judged}"
        self._note(0, 0, f"{share}, the smallest of {counted(len(rows), 'measured budget')} that meets the targets", seconds)
        if not found.compactions:
            self.terminal.warn(
                f"The probe evicted nothing at kv.budget = {found.budget:,}, because its responses end before they fill it at a "
                f"compaction. The budget rises if longer responses need it. Lower kv.interval = {self.config.kv.interval} to save "
                "memory."
            )

    def _measured(self, prompts: Sequence[Sequence[int]], budget: int) -> ProbeRow | None:
        """Return the measurement of this budget, or None if memory ran out."""
        if self._resize(budget) is None:
            self.budgets = [each for each in self.budgets if each < budget]
            return None
        return probe_budget(
            self.engine,
            self.actor.sampler,
            prompts,
            self.config.rollout.samples_per_prompt,
            self.config.rollout.sampling(self.config.seed),
            self.spec,
            tokens_per_pass=self.config.optimizer.tokens_per_microbatch,
            world=self.world,
            routing=self.config.model.routing_replay,
        )

    # During training

    def after_step(self, step: int, result: StepResult, metrics: dict[str, float]) -> dict[str, float]:
        """Follow the controller after a step with these metrics. Return the metrics of a rebuilt cache, if it was rebuilt."""
        figures = Figures(
            metrics[self.spec.judged_metric],
            sum(weight > 0 for weight in result.row_weights.values()),  # not those that are only logged
            metrics["sparse/xi_p05_long"],
            int(metrics["response/p90_tokens"]),
        )
        figures = self.world.gather(figures)[0]  # ranks must agree
        before, decision = self.state.budget, decide(figures, self.state, self.targets, self.budgets)
        self.state = decision.state
        if decision.unmet:
            self.terminal.warn(
                f"kv.budget = {before:,} is the largest that fits, and misses its targets: {decision.unmet}. To hold them, "
                f"{remedy(self.config.kv, self._memory_limits)}."
            )
            self._append(step, before, f"the largest budget misses the targets: {decision.unmet}")
        if not decision.reason:
            return {}
        seconds = self._resize(self.state.budget)
        if seconds is None:  # the plan was too optimistic
            self.budgets = [budget for budget in self.budgets if budget < decision.state.budget]
            self.state = BudgetState(before, figures.tokens)
            failed = f"kv.budget = {decision.state.budget:,} ran out of memory"
            self.terminal.warn(f"{failed}: the budget stays at {before:,}.")
            self._append(step, before, f"{failed}, which was tried for this reason: {decision.reason}")
            return {}
        self._note(step, before, decision.reason, seconds)
        return {"perf/rebuild_s": seconds}

    # The cache

    @property
    def _memory_limits(self) -> bool:
        """True if memory, not the longest sequence, limits the budgets."""
        return self.budgets[-1] < self.config.longest_kept(self.most_prompt_tokens)

    def _resize(self, budget: int) -> float | None:
        """Rebuild the cache and its graphs. Return the seconds. If memory runs out, restore the old cache and return None."""
        device, before = self.actor.learner.device, self.engine.kv.kept_tokens
        started, failed = device_time(device), False
        if budget == before:
            return 0.0
        try:
            self._rebuild(budget)
        except torch.OutOfMemoryError:
            failed = True
        if self.world.any(failed):
            torch.cuda.empty_cache()
            self._rebuild(before)
            return None
        layers = self.world.gather(checkpointed_layers(self.config, self.plan, self.actor.learner))
        self.optimizer.checkpointed_layers = max(self.optimizer.checkpointed_layers, *layers)  # FSDP runs layers together
        return device_time(device) - started

    def _rebuild(self, budget: int) -> None:
        device = self.actor.learner.device
        self.plan = self.plan and plan_budget(self.config, self.plan, budget)
        self.engine.resize(budget, slots_of(self.config, self.plan, device))
        reserve_step(self.engine, self.config, self.plan, self.most_prompt_tokens)
        if device.type == "cuda":  # capture the graphs now, to measure their time and to test memory
            try_sampler(self.engine, self.longest_prompt_ids, self.config)

    def _note(self, step: int, before: int, reason: str, seconds: float) -> None:
        """Log a change on the terminal, in budget.jsonl and in the next checkpoint."""
        was = f"was {before:,}" if before else "found by the probe"
        slots, held = counted(self.engine.slots, "slot"), size(self.engine.cache.kv_bytes)
        cost = f"{slots}, {held} of keys and values, rebuilt in {seconds:.1f} s"
        self.terminal.note(f"kv.budget is {self.state.budget:,} from step {step + 1} on, {was}: {reason} ({cost}).")
        self._append(step, before, reason)

    def _append(self, step: int, before: int, reason: str) -> None:
        row = {"step": step, "before": before, "after": self.state.budget, "reason": reason}
        self.changes.append(row)
        self.folder.append_budget(row)
