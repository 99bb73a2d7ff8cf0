"""Health checks of a run: warnings, and errors that end the run."""

from collections.abc import Callable, Sequence

from ..config import MAX_DRAWS, Config
from ..errors import UserError
from ..format import agreeing, counted
from ..learner.update import UpdateResult
from . import checkpoint_folder
from .checkpoint import State
from .rollouts import RolloutBatch
from .storage import Place

SILENT_STEPS = 3
"""Number of consecutive steps in which the reward graded no rollout, after which the run ends."""
QUIET_STEPS = 5
"""Interval in steps at which the no-signal warning repeats while no group has a signal."""


class Health:
    """Health checks that run after each step. The counters are stored in `state`, so a resumed run continues them."""

    def __init__(self, config: Config, state: State, checkpoints: Place, warn: Callable[[str], None]):
        self.config, self.state, self.checkpoints, self.warn = config, state, checkpoints, warn
        self.no_signal = ("", "")
        """Observation and reason of the last step without a signal."""

    def after_step(self, batch: RolloutBatch, updates: Sequence[UpdateResult]) -> None:
        """Update the counters in `state`. Warn if no group had a signal, an update was skipped, or the reward failed."""
        state, step = self.state, self.state.step
        broken = sum(not each.finite for each in updates)
        for each in updates:
            if each.learned or not each.finite:
                state.skipped_in_a_row = 0 if each.learned else state.skipped_in_a_row + 1
        state.skipped_updates += sum(not each.learned for each in updates)
        if broken:
            self.warn(
                f"Step {step}: skipped {broken} of {counted(len(updates), 'update')}, because loss or gradient was not finite."
            )
        quiet = not any(group.has_signal for group in batch.groups)
        if quiet:
            self.no_signal = self._no_signal(batch)
        state.quiet_steps = state.quiet_steps + 1 if quiet else 0
        if state.quiet_steps == 1 or (state.quiet_steps and state.quiet_steps % QUIET_STEPS == 0):
            since = f" for {state.quiet_steps} steps" if state.quiet_steps > 1 else ""
            what, why = self.no_signal
            learned = any(each.learned for each in updates)  # from lengths, if advantage.overlong penalises them
            then = "so only their lengths contribute to the loss" if learned else "so nothing is learned"
            self.warn(f"Step {step}: {what}{since}, {then}: {why}.")
        elif not quiet and not broken and not any(each.learned for each in updates):
            remedy = self.config.kv.remedy
            self.warn(f"Step {step}: every sequence with a signal was rejected, so nothing was learned: {remedy}.")
        for remark in batch.remarks(self.config.reward):
            self.warn(f"Step {step}: {remark}.")

    def _no_signal(self, batch: RolloutBatch) -> tuple[str, str]:
        """Return (observation, reason) of a step without any signal."""
        late = batch.counts["timeouts"] if self.config.reward.timeout == "zero" else 0  # their verdict is 0
        if missing := batch.failures - late:
            why = f"{missing} of {len(batch.samples)} rollouts got no verdict"
        elif cut := batch.counts["truncated"]:
            were = agreeing(cut, "was", "were")
            why = f"{cut} of {len(batch.samples)} rollouts {were} truncated and not graded; raise rollout.max_tokens"
        elif not all(group.equal_rewards for group in batch.groups):
            return (
                "every answer with a signal was truncated",
                "advantage.mask_truncated excludes them from the loss; raise rollout.max_tokens",
            )
        else:
            why = "the problems are too easy or too hard, or the reward gives all answers the same value"
        return "no group had two different rewards", why

    def stop_if_refill_fails(self) -> None:
        """End a run whose `rollout.refill` found no signal at all in `SILENT_STEPS` steps in a row."""
        if self.config.refill and self.state.quiet_steps >= SILENT_STEPS:
            what, why = self.no_signal
            rounds = f"{MAX_DRAWS} rounds of {counted(self.config.rollout.prompts_per_step, 'prompt')}"
            raise UserError(
                f"rollout.refill found no signal in {self.state.quiet_steps} steps of {rounds}: {what}, because {why}. "
                "Change data.train or the reward, or set rollout.refill = false."
            )

    def stop_if_not_finite(self) -> None:
        """Raise UserError after `optimizer.max_skipped_updates` consecutive updates with a non-finite loss or gradient."""
        skipped = self.state.skipped_in_a_row
        if skipped >= self.config.optimizer.max_skipped_updates:
            last = checkpoint_folder.latest(self.checkpoints)
            raise UserError(
                f"Loss or gradient was not finite in {counted(skipped, 'consecutive update')}: lower optimizer.lr or the "
                "loss coefficients; "
                f"{f'the last good checkpoint is {last}' if last else 'there is no checkpoint yet'}."
            )

    def stop_if_no_verdicts(self, batch: RolloutBatch) -> None:
        """Raise UserError if the reward graded no rollout in the first step, or in `SILENT_STEPS` consecutive steps."""
        state = self.state
        state.silent_steps = state.silent_steps + 1 if batch.grading_failure else 0
        if batch.grading_failure and (state.step == 0 or state.silent_steps >= SILENT_STEPS):
            last = checkpoint_folder.latest(self.checkpoints)
            remedy = f"fix reward.function{f' and continue from {last} with --resume' if last else ''}"
            raise UserError(f"{batch.grading_failure}: {remedy}.")
