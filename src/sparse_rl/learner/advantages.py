"""Group advantages: compare the rewards of the samples of one prompt. Pure functions on tensors."""

# P prompts, G samples per prompt, N responses

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import UserError

EPSILON = 1e-6  # added to the standard deviation, as in the published code


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch, and masks of samples and groups."""

    advantages: Tensor
    """Float [P, G]: advantages. They are 0 for samples that are not in the loss and for groups without signal."""
    in_loss: Tensor
    """Bool [P, G]: True if the sample has a verdict and its group has at least two verdicts."""
    equal_rewards: Tensor
    """Bool [P]: True for groups with two or more verdicts that are all equal."""


def group_advantages(rewards: Tensor, std: bool = True) -> Advantages:
    """Return A_i = (r_i - mean r)/(std r + 1e-6) over the samples of a group that have a verdict. std uses ddof 1.

    `rewards` is [P, G]; NaN means no verdict. Advantages are computed before any rollout is rejected.
    """
    verdict_PG = rewards.isfinite()
    verdicts_P1 = verdict_PG.sum(dim=1, keepdim=True)
    in_loss_PG = verdict_PG & (verdicts_P1 >= 2)
    known_PG = rewards.masked_fill(~verdict_PG, 0)
    mean_P1 = known_PG.sum(dim=1, keepdim=True) / verdicts_P1.clamp(min=1)
    centred_PG = (known_PG - mean_P1).masked_fill(~in_loss_PG, 0)
    # Compare the rewards themselves: their mean may be rounded, and a rounding error of 1e-8 divided by 1e-6 is not
    # negligible.
    high_P1 = rewards.masked_fill(~verdict_PG, -float("inf")).amax(dim=1, keepdim=True)
    low_P1 = rewards.masked_fill(~verdict_PG, float("inf")).amin(dim=1, keepdim=True)
    equal_P1 = (verdicts_P1 >= 2) & (high_P1 == low_P1)
    advantages_PG = centred_PG.masked_fill(equal_P1, 0)
    if std:
        variance_P1 = (advantages_PG**2).sum(dim=1, keepdim=True) / (verdicts_P1 - 1).clamp(min=1)
        advantages_PG = advantages_PG / (variance_P1.sqrt() + EPSILON)
    return Advantages(advantages_PG, in_loss_PG, equal_rewards=equal_P1[:, 0])


def overlong_penalty(lengths: Tensor, max_tokens: int, overlong: int) -> Tensor:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13), float [N]. Add it to the rewards before
    `group_advantages`.

    The penalty is 0 up to max_tokens - overlong tokens, then decreases linearly to -1 at max_tokens.
    """
    if overlong > max_tokens:
        raise UserError(
            f"advantage.overlong = {overlong} exceeds rollout.max_tokens = {max_tokens}, so every answer would be "
            f"penalized. Try --advantage.overlong {max_tokens // 4}."
        )
    excess_N = (lengths - (max_tokens - overlong)).clamp(min=0, max=overlong)
    return -excess_N / max(overlong, 1)
