"""One optimizer update: accumulate gradients over micro-batches of rollouts, then step the optimizer.

Every divisor is computed once for the whole update, so micro-batches are plain sums.
"""

# b rollouts of a micro-batch, n response tokens of a micro-batch, D hidden dimension

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SMDConfig
from ..models.compile import fused_layers
from ..models.sharded import is_sharded, sum_over_ranks, with_weights
from ..models.support import head_of
from ..rollout.rollout import Rollout
from ..world import ALONE, World
from .batch import Batch, OnePassBatch
from .logprobs import divergence
from .objective import Objective, PassOutput, Sums, add_other_terms, micro_batch, policy_term
from .optimizer import Optimizer, checkpointed
from .replay import HeadInputs, forward, passes_of, response_logprobs


def accumulate(
    model: PreTrainedModel,
    batch: Batch | OnePassBatch,
    passes: Sequence[Sequence[int]],
    objective: Objective,
    world: World = ALONE,
) -> dict[str, float]:
    """Add the gradients of the objective over the rows of these passes to the weights. Return sums over tokens, and the
    loss.

    A pass may have no rows, if other ranks have some.
    """
    sums: Sums = defaultdict(list)
    with fused_layers(model):
        for number, rows in enumerate(passes):
            ranks = sum_over_ranks(model, now=number == len(passes) - 1)
            _accumulate_pass(model, batch, rows, objective, world, ranks, sums)
    return {name: sum(float(value) for value in values) for name, values in sums.items()}


def _accumulate_pass(
    model: PreTrainedModel,
    batch: Batch | OnePassBatch,
    rows: Sequence[int],
    objective: Objective,
    world: World,
    ranks: int,
    sums: Sums,
) -> None:
    """Run one pass of `accumulate` and add its metrics to `sums`. A pass without a backward frees its graph on return."""
    output, rows = _finite_pass(model, batch, rows, objective, world)
    if not rows:
        if output is not None:  # other ranks of a sharded model have rows in this pass: join their collectives
            torch.stack([0 * each.sum() for each in output if each is not None]).sum().backward()
        return
    assert output is not None
    micro = micro_batch(batch, rows, output)
    loss, active_b = policy_term(micro, objective, sums)
    total = add_other_terms(loss, micro, objective, sums)
    if objective.covers_every_token(batch) or is_sharded(model) or isinstance(batch, Batch) or bool(active_b.any()):
        (total * ranks).backward()  # else every row of the pass is rejected: no gradient
    sums["loss"].append(total.detach())
    if output.flips_2 is not None:
        for name, value in zip(("routing_flips", "routing_choices"), output.flips_2, strict=True):
            sums[name].append(value)


def _finite_pass(
    model: PreTrainedModel,
    batch: Batch | OnePassBatch,
    rows: Sequence[int],
    objective: Objective,
    world: World,
) -> tuple[PassOutput | None, Sequence[int]]:
    """Run rows through the model and return (result, rows in it).

    In a one-pass batch, a row that is not finite would poison the gradient of its whole pack (0 * NaN). The pack then runs
    again without it. Ranks of a sharded model run every pass together: a rank without rows runs a rollout with weight 0.
    """
    while True:
        pack = [batch.rollouts[row] for row in rows]
        if not pack:
            if not is_sharded(model):
                return None, rows
            pack = [_dummy(batch)]
        output = with_weights(model, _forward_pass, pack, objective)
        if isinstance(batch, Batch):
            return output, rows
        broken = batch.record(rows, output.logprobs_n, output.entropy_n) if rows else []
        everywhere = world.gather(broken) if is_sharded(model) else [broken]
        if not any(everywhere):
            return output, rows
        del output  # frees its graph before the pack runs again
        batch.broken.update(*everywhere)
        rows = [row for row in rows if row not in broken]


def _dummy(batch: Batch | OnePassBatch) -> Rollout:
    """Return the shortest rollout that is not known to be broken: 0 * inf is not 0."""
    rows = batch.active if isinstance(batch, Batch) else sorted({*range(len(batch.rollouts))} - batch.broken)
    return min((batch.rollouts[row] for row in rows or [0]), key=lambda each: len(each.response))


def _forward_pass(model: PreTrainedModel, pack: Sequence[Rollout], objective: Objective) -> PassOutput:
    inputs = forward(model, pack, objective.view)
    logprobs_n, entropy_n = response_logprobs(model, inputs)
    distance_n = None if objective.smd is None else _distillation(model, pack, inputs, objective.smd)
    return PassOutput(logprobs_n, entropy_n, distance_n, None if inputs.routing is None else inputs.routing.flips_and_choices)


def _distillation(model: PreTrainedModel, pack: Sequence[Rollout], shadow: HeadInputs, smd: SMDConfig) -> Tensor:
    """Return the distance of the dense and the shadow policy at each token, [n]: Shadow Mask Distillation (arXiv
    2605.06850).

    `dense_to_shadow` is KL(dense || sg shadow) and `jsd` its symmetric form: both train only the dense policy.
    `shadow_to_dense` is KL(shadow || sg dense): the dense policy is the teacher.
    """
    trains_dense = smd.direction != "shadow_to_dense"
    with torch.set_grad_enabled(trains_dense):
        dense = forward(model, pack, "dense")
    student, teacher = (dense, shadow) if trains_dense else (shadow, dense)
    kind = "jsd" if smd.direction == "jsd" else "kl"
    return divergence(head_of(model), student.hidden_nD, teacher.hidden_nD, student.temperatures_n, kind=kind, top=smd.top_k)


def _summed(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sum the metrics of all ranks."""
    return {name: sum(each.get(name, 0.0) for each in ranks) for name in {name for each in ranks for name in each}}


@dataclass(frozen=True)
class UpdateResult:
    """Outcome of one optimizer update."""

    sums: dict[str, float]
    grad_norm: float
    learned: bool
    """True if the weights were changed."""
    finite: bool
    """False if the loss or the gradient was not finite."""


def update(
    model: PreTrainedModel,
    optimizer: Optimizer,
    step: int,
    batch: Batch | OnePassBatch,
    objective: Objective,
    world: World = ALONE,
) -> UpdateResult:
    """Update the weights once at the learning rate of `step`. Change nothing if no row has a signal, or if the loss or the
    gradient is not finite.

    Rows that are not in the policy loss run through the model only if another term needs them.
    """
    every_token = objective.covers_every_token(batch)
    rows = batch.rows(every_token=every_token)
    if not rows:
        return UpdateResult({}, 0.0, learned=False, finite=True)
    with checkpointed(model, optimizer.checkpointed_layers):
        trained = [batch.rollouts[row] for row in rows]
        passes = passes_of(model, trained, objective.view, optimizer.settings.tokens_per_microbatch, world)
        passes = [[rows[index] for index in indices] for indices in passes]
        sums = _summed(world.gather(accumulate(model, batch, passes, objective, world)))
    if isinstance(batch, OnePassBatch):
        batch.share(world)
    if not is_sharded(model):
        world.sum_gradients(optimizer.collectors)
    active = sums.get("active_rows", 0)
    if not active or (sums.get("opsm_dropped") == active and not every_token):  # every row with a signal was dropped
        optimizer.clear()
        return UpdateResult(sums, 0.0, learned=False, finite=True)
    if not math.isfinite(sums["loss"]):
        optimizer.clear()
        return UpdateResult(sums, math.nan, learned=False, finite=False)
    if isinstance(batch, OnePassBatch) and (scale := batch.scale()) != 1:
        optimizer.scale_gradients(scale)
        sums["loss"] *= scale
    norm = optimizer.update(step)
    if norm is None:
        return UpdateResult(sums, math.nan, learned=False, finite=False)
    return UpdateResult(sums, norm, learned=True, finite=True)
