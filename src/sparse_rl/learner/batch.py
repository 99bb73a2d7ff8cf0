"""The data of one optimizer update: rollouts, advantages, old log-probs and the correction of every token.

Every divisor is computed once for the whole update, so micro-batches are plain sums.
"""

# B rollouts of the update, b of a micro-batch, T response tokens of the longest, n response tokens of a micro-batch

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..config import CorrectionSpec, LossConfig
from ..rollout.rollout import Rollout
from ..world import World
from .correction import Corrected, weigh
from .losses import Divides, aggregate_of


@dataclass(frozen=True)
class RowTerms:
    """Terms of a micro-batch's objective that do not carry a gradient, [b, T] each."""

    old_bT: Tensor
    weights_bT: Tensor
    shares_bT: Tensor
    kl_mask_bT: Tensor
    """Tokens of the other loss terms: KL, entropy and distillation."""


@dataclass(frozen=True)
class Batch:
    """Data of one update with old log-probs computed beforehand, one row per rollout; tensors are on the learner's device."""

    rollouts: Sequence[Rollout]
    advantages_B: Tensor
    sampler_BT: Tensor
    """Log-probs as the sampler recorded them."""
    old_BT: Tensor
    """Log-probs before the first update of the step, under the view that is trained."""
    mask_BT: Tensor
    corrected: Corrected
    shares_BT: Tensor
    reference_BT: Tensor | None = None

    @property
    def active(self) -> list[int]:
        """Rows that change the policy loss: not rejected, and better or worse than their group."""
        counts_B = (self.corrected.weights * self.shares_BT).sum(dim=1) * self.advantages_B.abs()
        return torch.nonzero(counts_B > 0).flatten().tolist()

    def rows(self, *, every_token: bool) -> list[int]:
        """Return the rows that change the loss. Only these run through the model. `every_token` is true if another loss term
        also covers rejected rows and rows without a signal."""
        active = self.active
        if not active or not every_token:
            return active
        covered_B = (self.shares_BT * self.corrected.kl_mask).any(dim=1)
        return sorted({*active, *torch.nonzero(covered_B).flatten().tolist()})

    def terms(self, chosen: Tensor, logprobs_bT: Tensor) -> RowTerms:
        corrected = self.corrected
        return RowTerms(self.old_BT[chosen], corrected.weights[chosen], self.shares_BT[chosen], corrected.kl_mask[chosen])


@dataclass(frozen=True)
class OnePassBatch:
    """Data of an update of the weights that sampled: pi_old = stopgrad pi_theta, so the training pass also gives old log-probs
    and the correction.

    Sequences are corrected one by one, in their micro-batch. A factor common to all tokens of the update (the mean weight of
    `normalize`, the number of kept tokens) is known only at the end: `scale` returns it for the summed gradients.
    """

    rollouts: Sequence[Rollout]
    advantages_B: Tensor
    sampler_BT: Tensor
    mask_BT: Tensor
    spec: CorrectionSpec
    divides: Divides
    shares_BT: Tensor
    """Shares by response tokens. The divisor of the correction may count kept tokens instead."""
    reference_BT: Tensor | None = None
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """log pi_old by row. Training passes add their rows; other rows may be known beforehand."""
    entropies: dict[int, Tensor] = field(default_factory=dict)
    """Sum of the entropy over the tokens, by row."""
    broken: set[int] = field(default_factory=set)
    """Rows with log-probs that are not finite."""

    def rows(self, *, every_token: bool) -> list[int]:
        """Return the rows to run through the model; see `Batch.rows`."""
        return list(range(len(self.rollouts))) if every_token else torch.nonzero(self.advantages_B).flatten().tolist()

    def terms(self, chosen: Tensor, logprobs_bT: Tensor) -> RowTerms:
        old_bT, mask_bT, shares_bT = logprobs_bT.detach(), self.mask_BT[chosen], self.shares_BT[chosen]
        weighed = weigh(old_bT - self.sampler_BT[chosen], mask_bT, self.spec)
        if self.divides == "sequence":
            shares_bT = shares_bT * (mask_bT.sum(dim=1) / weighed.divisors)[:, None]
        return RowTerms(old_bT, weighed.weights, shares_bT, weighed.kl_mask)

    def record(self, rows: Sequence[int], logprobs_n: Tensor, entropy_n: Tensor) -> list[int]:
        """Record log pi_old of these rows. Return those that are not finite."""
        lengths = [len(self.rollouts[row].response) for row in rows]
        logprobs = logprobs_n.detach().split(lengths)
        self.logprobs.update(zip(rows, logprobs, strict=True))
        self.entropies.update(zip(rows, (each.sum() for each in entropy_n.detach().split(lengths)), strict=True))
        finite_b = torch.stack([each.isfinite().all() for each in logprobs]).tolist()
        return [row for row, is_finite in zip(rows, finite_b, strict=True) if not is_finite]

    def share(self, world: World) -> None:
        """Exchange the recorded rows between ranks."""
        if world.size == 1:
            return
        device = self.mask_BT.device
        mine = {row: (self.logprobs[row].cpu(), entropy.cpu()) for row, entropy in self.entropies.items()}
        for part in world.gather(mine):
            for row, (logprobs, entropy) in part.items():
                self.logprobs[row], self.entropies[row] = logprobs.to(device), entropy.to(device)

    def scale(self) -> float:
        """Return the factor of the summed gradients, which divides by the mean weight and by kept tokens instead of all."""
        if not needs_every_row(self.spec, self.divides):
            return 1.0
        old_BT = padded([self.logprobs[row] for row in range(len(self.rollouts))])
        weighed = weigh(old_BT - self.sampler_BT, self.mask_BT, self.spec)
        factor = 1 / float(weighed.mean_weight) if self.spec.normalize else 1.0
        if divides_by_kept(self.spec, self.divides):
            factor *= float(self.mask_BT.sum() / weighed.divisors[self.mask_BT.any(dim=1)].sum())
        return factor


def needs_every_row(spec: CorrectionSpec, divides: Divides) -> bool:
    """Return whether an update in one pass needs log pi_old of all its rows, for a mean over them."""
    return spec.normalize or divides_by_kept(spec, divides)


def divides_by_kept(spec: CorrectionSpec, divides: Divides) -> bool:
    """Return whether the tokens that the correction keeps in the whole update divide the loss."""
    return spec.divisor == "kept" and divides == "batch"


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
    return Batch(
        rollouts=rollouts,
        advantages_B=advantages_B.to(device),
        sampler_BT=padded([rollout.logprobs for rollout in rollouts]).to(device),
        old_BT=padded(old),
        mask_BT=mask_BT,
        corrected=corrected,
        shares_BT=aggregate_of(loss).shares(mask_BT, corrected.divisors, max_tokens),
        reference_BT=None if reference is None else padded(reference),
    )


def make_one_pass_batch(
    rollouts: Sequence[Rollout],
    advantages_B: Tensor,
    spec: CorrectionSpec,
    loss: LossConfig,
    max_tokens: int,
    reference: Sequence[Tensor] | None = None,
    *,
    device: torch.device,
    known: dict[int, Tensor] | None = None,
) -> OnePassBatch:
    """Return the batch of an update in one pass. `known` are log pi_old of rows that are not trained."""
    mask_BT = response_mask(rollouts).to(device)
    aggregate = aggregate_of(loss)
    lengths_B = mask_BT.sum(dim=1).clamp(min=1).to(advantages_B.dtype)
    return OnePassBatch(
        rollouts=rollouts,
        advantages_B=advantages_B.to(device),
        sampler_BT=padded([rollout.logprobs for rollout in rollouts]).to(device),
        mask_BT=mask_BT,
        spec=spec,
        divides=aggregate.divides,
        shares_BT=aggregate.shares(mask_BT, lengths_B, max_tokens),
        reference_BT=None if reference is None else padded(reference),
        logprobs=dict(known or {}),
    )


def padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


def response_mask(rollouts: Sequence[Rollout]) -> Tensor:
    lengths_B = torch.tensor([len(rollout.response) for rollout in rollouts])
    return torch.arange(int(lengths_B.max())) < lengths_B[:, None]
