"""The objective of a micro-batch, summed over its tokens: policy loss, KL to the reference, entropy and distillation."""

# b rollouts of a micro-batch, T response tokens of the longest, n response tokens of a micro-batch

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import SHADOW_METHODS, Config, LossConfig, SMDConfig
from ..kernels.upload import upload
from ..rollout.rollout import Rollout
from .batch import Batch, OnePassBatch, RowTerms
from .correction import opsm
from .losses import LossInputs, get
from .losses.regularizers import kl, weighted_sum
from .replay import ReplayKind

Sums = defaultdict[str, list[Tensor]]
"""Metrics of the micro-batches so far, on the device: float() would wait for it."""


@dataclass(frozen=True)
class Objective:
    """Terms of the objective, and the view that the policy gradient runs on."""

    loss: LossConfig
    view: ReplayKind = "dense"
    smd: SMDConfig | None = None
    """Settings of the distillation; None for no such term."""
    opsm_delta: float | None = None

    @classmethod
    def of(cls, config: Config) -> "Objective":
        return cls(
            config.loss,
            view="sparse" if config.method in SHADOW_METHODS else "dense",
            smd=config.loss.smd if config.method == "smd" else None,
            opsm_delta=config.correction.opsm,
        )

    def covers_every_token(self, batch: Batch | OnePassBatch) -> bool:
        """Return whether a term besides the policy loss covers all tokens, including those of rejected rows and of rows without
        a signal."""
        return batch.reference_BT is not None or bool(self.loss.entropy_coef) or self.smd is not None


class PassOutput(NamedTuple):
    """Results of one training pass at its n response tokens."""

    logprobs_n: Tensor
    entropy_n: Tensor
    distance_n: Tensor | None
    """Distance of the dense and the shadow policy, for `smd`."""
    flips_2: Tensor | None
    """Pairs (token, router) for which the learner's router would choose other experts, and all pairs; for routing replay."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the batch that ran in one pass, and what the pass returned."""

    batch: Batch | OnePassBatch
    chosen: Tensor
    """The rows, [b]."""
    output: PassOutput
    where_n: Tensor
    """Flat index of each response token in [b, T]."""
    mask_bT: Tensor
    logprobs_bT: Tensor
    terms: RowTerms

    def scatter(self, values_n: Tensor) -> Tensor:
        return _scatter(values_n, self.where_n, self.mask_bT)


def micro_batch(batch: Batch | OnePassBatch, rows: Sequence[int], output: PassOutput) -> MicroBatch:
    chosen = upload(torch.tensor(rows), batch.mask_BT.device)
    mask_bT = batch.mask_BT[chosen]
    where_n = upload(_flat_indices([batch.rollouts[row] for row in rows], mask_bT.shape[1]), mask_bT.device)
    logprobs_bT = _scatter(output.logprobs_n, where_n, mask_bT)
    return MicroBatch(batch, chosen, output, where_n, mask_bT, logprobs_bT, batch.terms(chosen, logprobs_bT))


def policy_term(micro: MicroBatch, objective: Objective, sums: Sums) -> tuple[Tensor, Tensor]:
    """Return the policy loss, and a mask [b] of the rows that give it a gradient before OPSM."""
    batch, chosen, terms = micro.batch, micro.chosen, micro.terms
    advantages_b, weights_bT = batch.advantages_B[chosen], terms.weights_bT
    active_b = (weights_bT * terms.shares_bT).any(dim=1) & (advantages_b != 0)
    sums["active_rows"].append(active_b.sum())
    if objective.opsm_delta is not None:
        kept_b = opsm(micro.logprobs_bT, batch.sampler_BT[chosen], advantages_b, micro.mask_bT, objective.opsm_delta)
        sums["opsm_dropped"].append((~kept_b & active_b).sum())
        weights_bT = weights_bT * kept_b[:, None]
    low, high = objective.loss.clips
    inputs = LossInputs(
        logprobs=micro.logprobs_bT,
        old_logprobs=terms.old_bT,
        advantages=advantages_b,
        weights=weights_bT,
        mask=micro.mask_bT,
        shares=terms.shares_bT,
        clip_low=low,
        clip_high=high,
    )
    total, counts = get(objective.loss.name).loss(inputs)
    for name, value in counts.items():
        sums[name].append(value)
    return total, active_b


def add_other_terms(total: Tensor, micro: MicroBatch, objective: Objective, sums: Sums) -> Tensor:
    """Return `total` plus KL to the reference, entropy and distillation."""
    batch, loss, smd, terms = micro.batch, objective.loss, objective.smd, micro.terms
    if batch.reference_BT is not None:
        kl_bT = kl(micro.logprobs_bT, batch.reference_BT[micro.chosen], micro.mask_bT, loss.kl_estimator)
        total = total + loss.kl_coef * weighted_sum(kl_bT, terms.kl_mask_bT, terms.shares_bT)
        sums["kl_ref"].append(kl_bT.detach().sum())
    if loss.entropy_coef:
        entropy_bT = micro.scatter(micro.output.entropy_n)
        total = total - loss.entropy_coef * weighted_sum(entropy_bT, terms.kl_mask_bT, terms.shares_bT)
    if smd is not None:
        assert micro.output.distance_n is not None
        distance_bT = micro.scatter(micro.output.distance_n)
        total = total + smd.lambda_ * weighted_sum(distance_bT, terms.kl_mask_bT, terms.shares_bT)
        sums["distillation_kl"].append(distance_bT.detach().sum())
    return total


def _flat_indices(pack: Sequence[Rollout], longest: int) -> Tensor:
    """Return the flat index of each packed response token in [b, T], [n]."""
    return torch.cat([torch.arange(len(rollout.response)) + row * longest for row, rollout in enumerate(pack)])


def _scatter(values_n: Tensor, where_n: Tensor, mask_bT: Tensor) -> Tensor:
    """Scatter packed values into their rows, [b, T], with gradient."""
    empty = torch.zeros(mask_bT.numel(), dtype=values_n.dtype, device=values_n.device)
    return empty.index_copy(0, where_n, values_n).view(mask_bT.shape)
