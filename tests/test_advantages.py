"""Advantages: each sample against its group, over those with a verdict."""

import math
import statistics

import pytest
import torch

from sparse_rl import UserError
from sparse_rl.config import AdvantageConfig
from sparse_rl.learner.advantages import group_advantages, overlong_penalty

NO = math.nan


def by_hand(rewards, std):
    verdicts = [r for r in rewards if not math.isnan(r)]
    if len(verdicts) < 2 or len(set(verdicts)) == 1:
        return [0.0] * len(rewards)
    scale = statistics.stdev(verdicts) + 1e-6 if std else 1.0
    return [0.0 if math.isnan(r) else (r - statistics.mean(verdicts)) / scale for r in rewards]


@pytest.mark.parametrize("std", [True, False])
def test_an_advantage_is_the_distance_to_the_group_in_deviations(std):
    torch.manual_seed(0)
    rewards = torch.randn(20, 8, dtype=torch.float64)
    rewards[10:] = (rewards[10:] > 0).double()  # binary, as for mathematics
    rewards[torch.rand(20, 8) < 0.2] = NO
    out = group_advantages(rewards, std)
    for got, group in zip(out.advantages.tolist(), rewards.tolist(), strict=True):
        assert got == pytest.approx(by_hand(group, std), rel=1e-10, abs=1e-12)


def test_who_takes_part():
    rewards = torch.tensor([[1, 0, NO, 1], [1, NO, NO, NO], [NO] * 4, [0.1, 0.1, 0.1, NO], [1, 0, 1, math.inf]])
    out = group_advantages(rewards)
    assert out.in_loss.tolist() == [
        [True, True, False, True],
        [False] * 4,
        [False] * 4,
        [True, True, True, False],
        [True, True, True, False],
    ]
    assert out.equal_rewards.tolist() == [False, False, False, True, False]
    assert out.advantages.isfinite().all()
    assert not out.advantages[1:4].any() and not out.advantages[~out.in_loss].any()


def test_equal_rewards_give_no_advantage_however_they_round():
    for reward in (0.1, 0.7, 1 / 3, 1e6 + 0.1):
        out = group_advantages(torch.full((1, 7), reward))
        assert out.equal_rewards.all() and not out.advantages.any()


def test_the_overlong_penalty_grows_linearly_to_minus_one_at_the_limit():
    lengths = torch.tensor([1, 80, 81, 90, 95, 100])
    assert overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.05, -0.5, -0.75, -1])
    assert not overlong_penalty(lengths, 100, 0).any()
    assert overlong_penalty(lengths, 100, 100).tolist() == pytest.approx([-0.01, -0.8, -0.81, -0.9, -0.95, -1])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: overlong_penalty(torch.tensor([1]), 100, 101), "Try --advantage.overlong 25"),
        (lambda: AdvantageConfig(overlong=-1), "advantage.overlong = -1 is invalid"),
        (lambda: AdvantageConfig(sdt=False), "did you mean std"),
    ],
)
def test_refusals_name_the_remedy(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
