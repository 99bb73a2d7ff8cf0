"""The controller of kv.budget = auto: figures and state in, a decision out."""

import gzip
import json
import math
import random
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from sparse_rl.monitor.budget import (
    EVIDENCE,
    RETRY_STEPS,
    ROOM,
    RUNG,
    WINDOW,
    BudgetState,
    Failed,
    Figures,
    Targets,
    chance_of,
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


@pytest.mark.parametrize(
    ("rejected", "rollouts", "share"), [(5, 64, 0.02), (1, 8, 0.5), (64, 64, 0.1), (0, 64, 0.02), (30, 512, 0.04)]
)
def test_chance_is_the_tail_of_the_binomial_distribution(rejected, rollouts, share):
    exact = Fraction(share)
    terms = (math.comb(rollouts, k) * exact**k * (1 - exact) ** (rollouts - k) for k in range(rejected))
    assert chance_of(rejected, rollouts, share) == pytest.approx(float(1 - sum(terms)), rel=1e-9)


def test_chance_is_finite_for_large_steps():
    assert 0.4 < chance_of(2000, 100_000, 0.02) < 0.6 and chance_of(90_000, 100_000, 0.02) == 0


def test_too_many_rejected_raise_the_budget_with_a_reason():
    (decision,) = after([figures(10 / 128)], BudgetState(64, 100))
    assert decision.state == BudgetState(80, 100, failed=Failed(64, 100))
    assert decision.reason == "10 of 128 rollouts rejected (7.8%, target 2.0%)"


@pytest.mark.parametrize(("rejected", "budget"), [(6, 64), (7, 80), (10, 104), (16, 104)])
def test_the_size_of_a_rise_follows_the_evidence(rejected, budget):
    """One step of 64 rollouts. Two rungs only if even twice the target is exceeded by more than chance."""
    assert after([figures(rejected / 64, 64)], BudgetState(64, 100))[0].state.budget == budget


def test_chance_does_not_raise_the_budget():
    """One rejected rollout of 32 is 3 %, and no sign that the target is missed. Nor over the next steps."""
    decisions = after([figures(1 / 32, 32), *[figures(0.0, 32)] * 6], BudgetState(64, 100))
    assert {each.state.budget for each in decisions} == {64}


def test_a_sudden_rise_is_not_hidden_by_the_calm_steps_before():
    """Eleven rejected of 128 in one step are 9 %. Over eight steps they are less than 2 %."""
    decisions = after([*[figures(0.01)] * 7, figures(11 / 128)], BudgetState(64, 100))
    assert [each.state.budget for each in decisions] == [64] * 7 + [80]
    assert decisions[-1].reason.startswith("11 of 128 rollouts rejected (8.6%")


def test_a_small_excess_raises_the_budget_after_several_steps():
    """Four rejected of 64 are 6 %: no evidence in one step, but in three."""
    decisions = after([figures(4 / 64, 64)] * 4, BudgetState(64, 100))
    assert [each.state.budget for each in decisions[:3]] == [64, 64, 80]
    assert decisions[2].reason == "12 of 192 rollouts rejected (6.2%, target 2.0%)"


def recorded():
    """Return the budget and the figures of the steps at it, for each budget of the recorded runs with `kv.budget = "auto"`."""
    found = {}
    for path in sorted((Path(__file__).parents[1] / "experiments/evidence/l-long/raw").glob("best-*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file]
        for budget, steps in groupby((row for row in rows if "kv/budget" in row), key=lambda row: int(row["kv/budget"])):
            found[f"{path.name.split('.')[0]}, budget {budget}"] = (
                budget,
                [
                    figures(row["sparse/rejection_rate"], 64, row["sparse/xi_p05_long"], int(row["response/p90_tokens"]))
                    for row in steps
                ],
            )
    return found


RECORDED = recorded()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_near_the_target_do_not_raise_the_budget(name):
    """Each is below the target or exceeds it by no more than chance. A rule that reacted to one or two steps raised the budget
    three times."""
    budget, steps = RECORDED[name]
    state = BudgetState(budget, steps[0].tokens, failed=Failed(budget - 1, steps[0].tokens))
    assert not any(each.reason for each in after(steps, state, budgets=[budget - 1, budget, 2 * budget]))


def test_the_recorded_bad_step_raises_the_budget_if_it_continues():
    """Five rejected of 64 are chance; in two steps in a row they are not. Sixteen raise it at once."""
    budget, steps = RECORDED["best-1, budget 896"]
    assert round(64 * steps[-1].rejected) == 5
    for bad in ([5, 5], [16]):
        story = [*steps[:-1], *(replace(steps[-1], rejected=each / 64) for each in bad)]
        decisions = after(story, BudgetState(budget, steps[0].tokens), budgets=[896, 1112, 1392])
        assert [bool(each.reason) for each in decisions] == [False] * (len(decisions) - 1) + [True]


def steps_to_a_rise(share, seed, calm=0, most=100):
    """Steps of 64 rollouts until the budget rises, or None. Each is rejected with probability `share`, after `calm` steps at 1 %."""
    draw, state = random.Random(seed), BudgetState(64, 100)
    for step in range(1 - calm, most + 1):
        rejected = sum(draw.random() < (share if step > 0 else 0.01) for _ in range(64))
        state = decide(figures(rejected / 64, 64), state, TARGETS, [64, 80, 104]).state
        if state.budget > 64:
            return step
    return None


def test_a_rate_below_the_target_rarely_raises_the_budget():
    rises = {share: sum(steps_to_a_rise(share, seed) is not None for seed in range(100)) for share in (0.01, 0.015)}
    assert rises[0.01] <= 1 and rises[0.015] <= 5


@pytest.mark.parametrize(("share", "steps"), [(0.25, 1), (0.1, 4), (0.08, 5), (0.06, 8)])
def test_a_rate_above_the_target_raises_the_budget_within_a_few_steps(share, steps):
    """In nine of ten runs, after eight steps at half of the target."""
    waits = sorted(steps_to_a_rise(share, seed, calm=8) for seed in range(100))
    assert waits[89] <= steps


def test_the_tail_of_long_responses_raises_the_budget_though_nothing_is_rejected():
    (decision,) = after([figures(tail=0.5)], BudgetState(64, 100))
    assert decision.state.budget == 80 and decision.reason == "xi p05 of long responses 0.50 (limit 0.6)"
    assert after([figures(tail=0.5)], BudgetState(64, 100), Targets(0.02))[0].state.budget == 64


def test_grown_responses_raise_the_budget_on_less_evidence():
    (still,) = after([figures(8 / 128)], BudgetState(64, 100))
    (grown,) = after([figures(8 / 128, tokens=130)], BudgetState(64, 100))
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
    needed = math.ceil(EVIDENCE / (TARGETS.rejected * 8))
    decisions = after([figures(rollouts=8)] * needed, BudgetState(128, 100))
    assert [each.state.budget for each in decisions] == [128] * (needed - 1) + [104]


def test_a_rate_at_the_target_rarely_lowers_the_budget():
    """Not even with the fewest rollouts after which the budget may fall."""
    rollouts = math.ceil(EVIDENCE / TARGETS.rejected)
    assert 1 - chance_of(math.floor(ROOM * EVIDENCE) + 1, rollouts, TARGETS.rejected) < 0.02


def test_a_budget_that_failed_is_not_tried_again_at_the_same_lengths():
    (raised,) = after([figures(10 / 128)], BudgetState(64, 100))
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
    assert first.unmet == "26 of 128 rollouts rejected (20.3%, target 2.0%)" and second.unmet == ""
    assert better.unmet == "" and not better.state.is_limited


def test_steps_without_a_measurement_change_nothing():
    state = BudgetState(64, 100, (figures(),))
    assert decide(figures(math.nan), state, TARGETS, BUDGETS).state == state


def test_the_state_survives_a_checkpoint():
    """Decisions are the same with a checkpoint after every step."""
    draw, state = random.Random(0), BudgetState(64, 100)
    steps = [figures(draw.choice([0, 1, 2, 4, 9]) / 64, 64, tokens=draw.choice([90, 100, 140])) for _ in range(60)]
    for decision in after(steps, state):
        assert decide(steps.pop(0), state, TARGETS, BUDGETS) == decision
        state = BudgetState.from_json(json.loads(json.dumps(decision.state.as_json())))
    for decision in after([figures(), figures(0.1), figures(), figures(0.2)], BudgetState(300, 100), budgets=[*BUDGETS, 400]):
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
