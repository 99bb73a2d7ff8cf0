"""One optimizer update: accumulate gradients over micro-batches of rollouts, then step the optimizer.

Every divisor is computed once for the whole update, so micro-batches are plain sums.
"""

# B rollouts of the update, b of a micro-batch, T response tokens of the longest, n response tokens of a micro-batch

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..config import LossConfig, SMDConfig
from ..learner.correction import Corrected, opsm
from ..models.compile import fused_layers
from ..models.sharded import is_sharded, sum_over_ranks, with_weights
from ..models.support import head_of
from ..rollout.rollout import Rollout
from ..world import ALONE, World
from .logprobs import divergence
from .losses import LossInputs, get
from .losses.regularizers import kl, weighted_sum
from .optimizer import Optimizer, checkpointed
from .replay import PassOutput, ReplayKind, forward, passes_of, response_logprobs, upload


@dataclass(frozen=True)
class Batch:
    """Data of one update, one row per rollout; tensors are on the learner's device."""

    rollouts: Sequence[Rollout]
    advantages_B: Tensor
    sampler_BT: Tensor
    """Log-probs as the sampler recorded them."""
    old_BT: Tensor
    """Log-probs before the first update of the step, under the view that is trained."""
    mask_BT: Tensor
    corrected: Corrected
    shares_BT: Tensor
    kl_shares_BT: Tensor
    """Shares of the terms beside the policy loss, which run over `corrected.kl_mask`."""
    reference_BT: Tensor | None = None

    @property
    def active(self) -> list[int]:
        """Rows that change the policy loss: not rejected, and better or worse than their group."""
        counts_B = (self.corrected.weights * self.shares_BT).sum(dim=1) * self.advantages_B.abs()
        return torch.nonzero(counts_B > 0).flatten().tolist()


def make_batch(
    rollouts: Sequence[Rollout],
    advantages_B: Tensor,
    old: Sequence[Tensor],
    corrected: Corrected,
    loss: LossConfig,
    max_tokens: int,
    reference: Sequence[Tensor] | None = None,
) -> Batch:
    device = old[0].device
    mask_BT = response_mask(rollouts).to(device)
    shares_BT = get(loss.name).shares(mask_BT, corrected.divisors, max_tokens)
    return Batch(
        rollouts=rollouts,
        advantages_B=advantages_B.to(device),
        sampler_BT=padded([rollout.logprobs for rollout in rollouts]).to(device),
        old_BT=padded(old),
        mask_BT=mask_BT,
        corrected=corrected,
        shares_BT=shares_BT,
        kl_shares_BT=shares_BT * corrected.kl_mask,
        reference_BT=None if reference is None else padded(reference),
    )


def padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


def response_mask(rollouts: Sequence[Rollout]) -> Tensor:
    lengths_B = torch.tensor([len(rollout.response) for rollout in rollouts])
    return torch.arange(int(lengths_B.max())) < lengths_B[:, None]


def accumulate(
    model: PreTrainedModel,
    batch: Batch,
    passes: Sequence[Sequence[int]],
    loss: LossConfig,
    view: ReplayKind,
    smd: SMDConfig | None,
    opsm_delta: float | None,
) -> dict[str, float]:
    """Add the gradients of the objective over the rows of these passes to the weights. Return sums over tokens, and the
    loss.

    A pass without rows keeps step with other ranks that have rows: any rollout runs through the model and counts nothing.
    """
    parts: dict[str, list[Tensor]] = defaultdict(list)  # read at the end: until then the host runs ahead of the GPU
    dummy_rows = [] if all(passes) else batch.active[:1] or [0]  # a rejected row may not be finite, and 0 * inf is not 0
    with fused_layers(model):
        for number, rows in enumerate(passes):
            chosen = upload(torch.tensor(rows or dummy_rows), batch.old_BT.device)
            pack = [batch.rollouts[row] for row in rows or dummy_rows]
            ranks = sum_over_ranks(model, now=number == len(passes) - 1)
            logprobs_n, entropy_n, distance_n = with_weights(model, _forward_pass, pack, view, smd)
            if not rows:
                (0 * sum(each.sum() for each in (logprobs_n, entropy_n, distance_n) if each is not None)).backward()
                continue
            mask_bT = batch.mask_BT[chosen]
            where_n = upload(_flat_indices(pack, mask_bT.shape[1]), logprobs_n.device)
            logprobs_bT = _scatter(logprobs_n, where_n, mask_bT)
            weights_bT = batch.corrected.weights[chosen]
            if opsm_delta is not None:
                kept_b = opsm(logprobs_bT, batch.sampler_BT[chosen], batch.advantages_B[chosen], mask_bT, opsm_delta)
                parts["opsm_dropped"].append((~kept_b & weights_bT.any(dim=1)).sum())
                weights_bT = weights_bT * kept_b[:, None]
            low, high = loss.clips
            inputs = LossInputs(
                logprobs=logprobs_bT,
                old_logprobs=batch.old_BT[chosen],
                advantages=batch.advantages_B[chosen],
                weights=weights_bT,
                mask=mask_bT,
                shares=batch.shares_BT[chosen],
                clip_low=low,
                clip_high=high,
            )
            total, counts = get(loss.name).loss(inputs)
            kl_mask_bT, kl_shares_bT = batch.corrected.kl_mask[chosen], batch.kl_shares_BT[chosen]
            if batch.reference_BT is not None:
                kl_bT = kl(logprobs_bT, batch.reference_BT[chosen], mask_bT, loss.kl_estimator)
                total = total + loss.kl_coef * weighted_sum(kl_bT, kl_mask_bT, kl_shares_bT)
                parts["kl_ref"].append(kl_bT.detach().sum())
            if loss.entropy_coef:
                total = total - loss.entropy_coef * weighted_sum(
                    _scatter(entropy_n, where_n, mask_bT), kl_mask_bT, kl_shares_bT
                )
            if smd is not None:
                distance_bT = _scatter(distance_n, where_n, mask_bT)
                total = total + smd.lambda_ * weighted_sum(distance_bT, kl_mask_bT, kl_shares_bT)
                parts["distillation_kl"].append(distance_bT.detach().sum())
            (total * ranks).backward()
            parts["loss"].append(total.detach())
            for name, value in counts.items():
                parts[name].append(value)
    return {name: sum(float(value) for value in values) for name, values in parts.items()}


def _forward_pass(
    model: PreTrainedModel, pack: Sequence[Rollout], view: ReplayKind, smd: SMDConfig | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (log-probs, entropies, distances of the dense and the shadow policy or None), [n] each."""
    output = forward(model, pack, view)
    logprobs_n, entropy_n = response_logprobs(model, output)
    return logprobs_n, entropy_n, None if smd is None else _distillation(model, pack, output, smd)


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

    `dense_to_shadow` is KL(dense || sg shadow) and `jsd` its symmetric form: both train the dense policy alone.
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
    batch: Batch,
    loss: LossConfig,
    *,
    view: ReplayKind = "dense",
    smd: SMDConfig | None = None,
    opsm_delta: float | None = None,
    world: World = ALONE,
) -> Updated:
    """Update the weights once at the learning rate of `step`. Changes nothing if no row has a signal, or if the loss or the
    gradient is not finite.

    Rows that are not in the policy loss run through the model only if another term needs them.
    """
    rows = batch.active
    if not rows:
        return Updated({}, 0.0, learned=False, finite=True)
    if batch.reference_BT is not None or loss.entropy_coef or smd is not None:
        rows = sorted({*rows, *torch.nonzero(batch.kl_shares_BT.any(dim=1)).flatten().tolist()})
    settings = optimizer.settings
    with checkpointed(model, settings.gradient_checkpointing):
        passes = passes_of([batch.rollouts[row] for row in rows], settings.tokens_per_microbatch, world)
        passes = [[rows[index] for index in indices] for indices in passes]
        sums = _summed(world.gather(accumulate(model, batch, passes, loss, view, smd, opsm_delta)))
    if not is_sharded(model):
        world.sum_gradients(optimizer.masters)
    if sums.get("opsm_dropped") == len(rows) and rows == batch.active:  # every active row was dropped
        optimizer.clear()
        return Updated(sums, 0.0, learned=False, finite=True)
    if not math.isfinite(sums["loss"]):
        optimizer.clear()
        return Updated(sums, math.nan, learned=False, finite=False)
    norm = optimizer.update(step)
    if norm is None:
        return Updated(sums, math.nan, learned=False, finite=False)
    return Updated(sums, norm, learned=True, finite=True)
