"""Choose the rollouts that run through the learner, and when: before the first update, or only in their training pass.

The first update of a step trains the weights that sampled: pi_old = stopgrad pi_theta. Its training pass therefore gives log
pi_old, and only the rows of later updates need a separate pass. Rows without a signal are not trained. A random share of them
runs forward for the metrics, and each of these represents several.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Config, CorrectionSpec
from ..learner.batch import needs_every_row
from ..learner.losses import aggregate_of
from .rollouts import RolloutBatch, RolloutGroup

MEASURED_SHARE = 0.25
"""Share of the rows without a training pass that run forward for the metrics."""
MIN_MEASURED = 8
"""Minimum number of such rows, if there are that many."""


@dataclass(frozen=True)
class PassPlan:
    before: list[int]
    """Rows whose log-probs are computed before the first update."""
    row_weights: dict[int, float]
    """Rows with log-probs after the step, and the number of rows of the step that each represents in the metrics."""


def plan_passes(
    config: Config, spec: CorrectionSpec, batch: RolloutBatch, updates: Sequence[Sequence[RolloutGroup]], seed: int
) -> PassPlan:
    """Plan the passes of a step whose updates use these groups. `seed` chooses the rows that are only measured."""
    every = range(len(batch.samples))
    if not config.one_pass:
        return PassPlan(list(every), dict.fromkeys(every, 1.0))
    first, *later = [[sample for group in groups for sample in group.samples if sample.in_loss] for groups in updates]
    trained = {sample.row for sample in first if config.loss.has_other_terms or sample.advantage}
    before = {sample.row for samples in later for sample in samples}
    if needs_every_row(spec, aggregate_of(config.loss).divides):
        before |= {sample.row for sample in first} - trained
    rest = [row for row in every if row not in trained and row not in before]
    count = min(len(rest), max(MIN_MEASURED, round(MEASURED_SHARE * len(rest))))
    measured = random.Random(seed).sample(rest, count)
    weights = dict.fromkeys([*trained, *before], 1.0) | {row: len(rest) / count for row in measured}
    traces = config.log.traces_per_step - sum(row in weights for row in batch.recorded)
    logged = [row for row in batch.recorded if row not in weights][: max(0, traces)]
    weights |= dict.fromkeys(logged, 0.0)  # only for the log
    return PassPlan(sorted(before.union(measured, logged)), dict(sorted(weights.items())))
