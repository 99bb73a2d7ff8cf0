"""One optimizer update: accumulate gradients over micro-batches of rollouts, then step the optimizer.

Every divisor is computed once for the whole update, so micro-batches are plain sums.
"""

# B rollouts of the update, b of a micro-batch, T response tokens of the longest, n response tokens of a micro-batch

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import LossConfig, SMDConfig
from ..kernels.upload import upload
from ..models.compile import fused_layers
from ..models.sharded import is_sharded, sum_over_ranks, with_weights
from ..models.support import head_of
from ..rollout.rollout import Rollout
from ..world import ALONE, World
from .batch import Batch, OnePassBatch
from .correction import opsm
from .logprobs import divergence
from .losses import LossInputs, get
from .losses.regularizers import kl, weighted_sum
from .optimizer import Optimizer, checkpointed
from .packing import passes_of
from .replay import PassOutput, ReplayKind, forward, may_share_prompts, response_logprobs


def accumulate(
    model: PreTrainedModel,
    batch: Batch | OnePassBatch,
    passes: Sequence[Sequence[int]],
    loss: LossConfig,
    view: ReplayKind,
    smd: SMDConfig | None,
    opsm_delta: float | None,
    world: World = ALONE,
) -> dict[str, float]:
    """Add the gradients of the objective over the rows of these passes to the weights. Return sums over tokens, and the
    loss.

    A pass may have no rows, if other ranks have some.
    """
    parts: dict[str, list[Tensor]] = defaultdict(list)  # converted at the end, because float() waits for the device
    with fused_layers(model):
        for number, rows in enumerate(passes):
            ranks = sum_over_ranks(model, now=number == len(passes) - 1)
            _accumulate_pass(model, batch, rows, loss, view, smd, opsm_delta, world, ranks, parts)
    return {name: sum(float(value) for value in values) for name, values in parts.items()}


def _accumulate_pass(
    model: PreTrainedModel,
    batch: Batch | OnePassBatch,
    rows: Sequence[int],
    loss: LossConfig,
    view: ReplayKind,
    smd: SMDConfig | None,
    opsm_delta: float | None,
    world: World,
    ranks: int,
    parts: dict[str, list[Tensor]],
) -> None:
    """Run one pass of `accumulate` and add its sums to `parts`. A pass without a backward frees its graph on return."""
    output, rows = _finite_pass(model, batch, rows, view, smd, world)
    if not rows:
        if output is not None:
            torch.stack([0 * each.sum() for each in output if each is not None]).sum().backward()
        return
    assert output is not None
    if output.flips_2 is not None:
        for name, value in zip(("routing_flips", "routing_choices"), output.flips_2, strict=True):
            parts[name].append(value)
    chosen = upload(torch.tensor(rows), batch.mask_BT.device)
    mask_bT = batch.mask_BT[chosen]
    where_n = upload(_flat_indices([batch.rollouts[row] for row in rows], mask_bT.shape[1]), mask_bT.device)
    logprobs_bT = _scatter(output.logprobs_n, where_n, mask_bT)
    terms = batch.terms(chosen, logprobs_bT)
    advantages_b, weights_bT = batch.advantages_B[chosen], terms.weights_bT
    active_b = (weights_bT * terms.shares_bT).any(dim=1) & (advantages_b != 0)
    parts["active_rows"].append(active_b.sum())
    if opsm_delta is not None:
        kept_b = opsm(logprobs_bT, batch.sampler_BT[chosen], advantages_b, mask_bT, opsm_delta)
        parts["opsm_dropped"].append((~kept_b & active_b).sum())
        weights_bT = weights_bT * kept_b[:, None]
    low, high = loss.clips
    inputs = LossInputs(
        logprobs=logprobs_bT,
        old_logprobs=terms.old_bT,
        advantages=advantages_b,
        weights=weights_bT,
        mask=mask_bT,
        shares=terms.shares_bT,
        clip_low=low,
        clip_high=high,
    )
    total, counts = get(loss.name).loss(inputs)
    if batch.reference_BT is not None:
        kl_bT = kl(logprobs_bT, batch.reference_BT[chosen], mask_bT, loss.kl_estimator)
        total = total + loss.kl_coef * weighted_sum(kl_bT, terms.kl_mask_bT, terms.shares_bT)
        parts["kl_ref"].append(kl_bT.detach().sum())
    if loss.entropy_coef:
        entropy_bT = _scatter(output.entropy_n, where_n, mask_bT)
        total = total - loss.entropy_coef * weighted_sum(entropy_bT, terms.kl_mask_bT, terms.shares_bT)
    if smd is not None:
        assert output.distance_n is not None
        distance_bT = _scatter(output.distance_n, where_n, mask_bT)
        total = total + smd.lambda_ * weighted_sum(distance_bT, terms.kl_mask_bT, terms.shares_bT)
        parts["distillation_kl"].append(distance_bT.detach().sum())
    every_token = _covers_every_token(batch, loss, smd)
    if every_token or is_sharded(model) or isinstance(batch, Batch) or bool(active_b.any()):
        (total * ranks).backward()  # else every row of the pass is rejected: no gradient
    parts["loss"].append(total.detach())
    for name, value in counts.items():
        parts[name].append(value)


def _covers_every_token(batch: Batch | OnePassBatch, loss: LossConfig, smd: SMDConfig | None) -> bool:
    """Return whether another loss term covers all tokens, also those of rejected rows and of rows without a signal."""
    return batch.reference_BT is not None or bool(loss.entropy_coef) or smd is not None


class PassTensors(NamedTuple):
    """Results of one training pass at its n response tokens."""

    logprobs_n: Tensor
    entropy_n: Tensor
    distance_n: Tensor | None
    """Distance of the dense and the shadow policy, for `smd`."""
    flips_2: Tensor | None
    """Pairs (token, router) for which the learner's router would choose other experts, and all pairs; for routing replay."""


def _finite_pass(
    model: PreTrainedModel,
    batch: Batch | OnePassBatch,
    rows: Sequence[int],
    view: ReplayKind,
    smd: SMDConfig | None,
    world: World,
) -> tuple[PassTensors | None, Sequence[int]]:
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
        output = with_weights(model, _forward_pass, pack, view, smd)
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


def _forward_pass(model: PreTrainedModel, pack: Sequence[Rollout], view: ReplayKind, smd: SMDConfig | None) -> PassTensors:
    output = forward(model, pack, view)
    logprobs_n, entropy_n = response_logprobs(model, output)
    distance_n = None if smd is None else _distillation(model, pack, output, smd)
    return PassTensors(logprobs_n, entropy_n, distance_n, None if output.routing is None else output.routing.flips_and_choices)


def _flat_indices(pack: Sequence[Rollout], longest: int) -> Tensor:
    """Return the flat index of each packed response token in [b, T], [n]."""
    return torch.cat([torch.arange(len(rollout.response)) + row * longest for row, rollout in enumerate(pack)])


def _scatter(values_n: Tensor, where_n: Tensor, mask_bT: Tensor) -> Tensor:
    """Scatter packed values into their rows, [b, T], with gradient."""
    empty = torch.zeros(mask_bT.numel(), dtype=values_n.dtype, device=values_n.device)
    return empty.index_copy(0, where_n, values_n).view(mask_bT.shape)


def _distillation(model: PreTrainedModel, pack: Sequence[Rollout], shadow: PassOutput, smd: SMDConfig) -> Tensor:
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


def _summed(sums: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sum the metrics of all ranks."""
    return {name: sum(each.get(name, 0.0) for each in sums) for name in {name for each in sums for name in each}}


@dataclass(frozen=True)
class Updated:
    sums: dict[str, float]
    grad_norm: float
    learned: bool
    """True if the weights were changed."""
    finite: bool


def update(
    model: PreTrainedModel,
    optimizer: Optimizer,
    step: int,
    batch: Batch | OnePassBatch,
    loss: LossConfig,
    *,
    view: ReplayKind = "dense",
    smd: SMDConfig | None = None,
    opsm_delta: float | None = None,
    world: World = ALONE,
) -> Updated:
    """Update the weights once at the learning rate of `step`. Change nothing if no row has a signal, or if the loss or the
    gradient is not finite.

    Rows that are not in the policy loss run through the model only if another term needs them.
    """
    every_token = _covers_every_token(batch, loss, smd)
    rows = batch.rows(every_token=every_token)
    if not rows:
        return Updated({}, 0.0, learned=False, finite=True)
    with checkpointed(model, optimizer.checkpointed_layers):
        trained = [batch.rollouts[row] for row in rows]
        share_prompts = view == "dense" and may_share_prompts(model)
        passes = passes_of(trained, optimizer.settings.tokens_per_microbatch, world, share_prompts=share_prompts)
        passes = [[rows[index] for index in indices] for indices in passes]
        sums = _summed(world.gather(accumulate(model, batch, passes, loss, view, smd, opsm_delta, world)))
    if isinstance(batch, OnePassBatch):
        batch.share(world)
    if not is_sharded(model):
        world.sum_gradients(optimizer.collectors)
    active = sums.get("active_rows", 0)
    if not active or (sums.get("opsm_dropped") == active and not every_token):  # every row with a signal was dropped
        optimizer.clear()
        return Updated(sums, 0.0, learned=False, finite=True)
    if not math.isfinite(sums["loss"]):
        optimizer.clear()
        return Updated(sums, math.nan, learned=False, finite=False)
    if isinstance(batch, OnePassBatch) and (scale := batch.scale()) != 1:
        optimizer.scale_gradients(scale)
        sums["loss"] *= scale
    norm = optimizer.update(step)
    if norm is None:
        return Updated(sums, math.nan, learned=False, finite=False)
    return Updated(sums, norm, learned=True, finite=True)
