"""The controller of kv.budget = auto: figures and state in, a decision out."""

import json
import math
import random
from itertools import pairwise

import pytest

from sparse_rl.monitor.budget import (
    RETRY_STEPS,
    RUNG,
    WINDOW,
    BudgetState,
    Failed,
    Figures,
    Targets,
    decide,
    ladder,
    long_length,
)

TARGETS = Targets(rejected=0.02, tail=0.6)
BUDGETS = ladder(32, 300)


def figures(rejected=0.0, rollouts=128, tail=0.95, tokens=100):
    return Figures(rejected, rollouts, tail, tokens)


def after(steps, state, targets=TARGETS, budgets=BUDGETS):
    """The decisions of consecutive steps with these figures."""
    found = []
    for each in steps:
        found.append(decide(each, state, targets, budgets))
        state = found[-1].state
    return found


def test_budgets_are_coarse_rungs():
    assert BUDGETS == [32, 40, 56, 64, 80, 104, 128, 160, 192, 240, 300]
    assert ladder(20, 24) == [24] and ladder(64, 64) == [64] and ladder(100, 40) == [40]


def test_length_of_long_responses():
    assert long_length(range(1, 101)) == 90 and long_length([7]) == 7 and long_length([3, 9]) == 9


def test_too_many_rejected_raise_the_budget_with_a_reason():
    (decision,) = after([figures(0.05)], BudgetState(64, 100))
    assert decision.state == BudgetState(80, 100, failed=Failed(64, 100))
    assert decision.reason == "6 of 128 rollouts rejected (5.0%, target 2.0%)"
    (far,) = after([figures(0.1)], BudgetState(64, 100))
    assert far.state.budget == 104


def test_chance_does_not_raise_the_budget():
    """One rejected rollout of 32 is 3 %, and no sign that the target is missed. Nor over the next steps."""
    decisions = after([figures(1 / 32, 32), *[figures(0.0, 32)] * 6], BudgetState(64, 100))
    assert {each.state.budget for each in decisions} == {64}


def test_a_sudden_rise_is_not_hidden_by_the_calm_steps_before():
    """Seven rejected of 128 in one step are 5 %. Over eight steps they are less than 2 %."""
    decisions = after([*[figures(0.01)] * 7, figures(7 / 128)], BudgetState(64, 100))
    assert [each.state.budget for each in decisions] == [64] * 7 + [80]
    assert decisions[-1].reason.startswith("7 of 128 rollouts rejected (5.5%")


def test_the_tail_of_long_responses_raises_the_budget_though_nothing_is_rejected():
    (decision,) = after([figures(tail=0.5)], BudgetState(64, 100))
    assert decision.state.budget == 80 and decision.reason == "xi p05 of long responses 0.50 (limit 0.6)"
    assert after([figures(tail=0.5)], BudgetState(64, 100), Targets(0.02))[0].state.budget == 64


def test_grown_responses_raise_the_budget_on_less_evidence():
    steps = [figures(3 / 128, tokens=100), figures(3 / 128, tokens=130)]
    still, grown = after(steps, BudgetState(64, 100))
    assert still.state.budget == 64 and grown.state.budget == 80
    assert grown.reason.endswith("; responses of 130 tokens, 100 when the budget was set")


def test_room_lowers_the_budget_by_one_rung_after_a_window():
    decisions = after([figures()] * WINDOW, BudgetState(128, 100))
    assert [each.state.budget for each in decisions] == [128] * (WINDOW - 1) + [104]
    assert decisions[-1].reason == f"0 of 1024 rollouts rejected (0.0%, target 2.0%) in {WINDOW} steps leave room"


@pytest.mark.parametrize(
    "steps",
    [[figures(0.015)] * 20, [figures(tail=0.65)] * 20, [figures(tokens=130)] * 20, [figures(rollouts=8)] * 20],
    ids=["near the target", "tail near its limit", "grown", "few rollouts"],
)
def test_no_room_no_change(steps):
    assert {each.state.budget for each in after(steps, BudgetState(128, 100))} == {128}


def test_few_rollouts_a_step_are_judged_over_more_steps():
    decisions = after([figures(rollouts=8)] * 25, BudgetState(128, 100))
    assert [each.state.budget for each in decisions].count(128) == 24 and decisions[-1].state.budget == 104


def test_a_budget_that_failed_is_not_tried_again_at_the_same_lengths():
    (raised,) = after([figures(0.05)], BudgetState(64, 100))
    calm = after([figures()] * (RETRY_STEPS - 1), raised.state)
    assert {each.state.budget for each in calm} == {80}
    assert after([figures()], calm[-1].state)[0].state.budget == 64
    shorter = after([figures(tokens=int(100 / RUNG))] * WINDOW, raised.state)
    assert shorter[-1].state.budget == 64


def test_the_smallest_and_the_largest_budget_are_kept():
    assert {each.state.budget for each in after([figures()] * 30, BudgetState(32, 100))} == {32}
    first, second, better, again = after(
        [figures(0.2), figures(0.2), *[figures(0.0, 10_000), figures(0.2)]], BudgetState(300, 100)
    )
    assert first.state.budget == again.state.budget == 300
    assert first.unmet == "26 of 128 rollouts rejected (20.0%, target 2.0%)" and second.unmet == ""
    assert better.unmet == "" and not better.state.is_limited


def test_steps_without_a_measurement_change_nothing():
    state = BudgetState(64, 100, (figures(),))
    assert decide(figures(math.nan), state, TARGETS, BUDGETS).state == state


def test_the_state_survives_a_checkpoint():
    for decision in after([figures(), figures(0.05), figures(), figures(0.2)], BudgetState(300, 100), budgets=[*BUDGETS, 400]):
        assert BudgetState.from_json(json.loads(json.dumps(decision.state.as_json()))) == decision.state
    with pytest.raises(ValueError, match="budget is"):
        BudgetState.from_json(BudgetState(64).as_json() | {"budget": 0})


def test_rejection_is_held_while_answers_grow():
    """A plant in which a response of t tokens is rejected with probability (t / budget / 8)², growing from 80 to 240 tokens.

    The budget it begins with ends at 14 % rejected. The controller stays within twice the target, with fewer than ten
    changes, and lowers the budget when responses shrink again.
    """
    draw, state = random.Random(0), BudgetState(80, 80)
    lengths = [80 + 2 * step for step in range(80)] + [240] * 20 + [100] * 80
    shares, budgets = [], []
    for tokens in lengths:
        chance = (tokens / state.budget / 8) ** 2
        rejected = sum(draw.random() < chance for _ in range(128)) / 128
        shares.append(rejected)
        budgets.append(state.budget)
        state = decide(figures(rejected, tokens=tokens), state, TARGETS, ladder(32, 600)).state
    assert sum(shares[:100]) / 100 < 2 * TARGETS.rejected and sum(shares[80:100]) / 20 < 2 * TARGETS.rejected
    assert (240 / 80 / 8) ** 2 > 0.14 and max(budgets) > 160 and budgets[-1] < 130
    assert sum(left != right for left, right in pairwise(budgets)) < 12
