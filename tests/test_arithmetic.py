"""The embedded task: problems repeat by seed, splits never meet, worked solutions are right, grading is exact."""

import re
from itertools import pairwise

import pytest

from sparse_rl.data.arithmetic import grade, make_problems, split_of


def test_same_arguments_make_the_same_problems():
    assert make_problems(20, seed=3) == make_problems(20, seed=3)
    assert make_problems(20, seed=3) != make_problems(20, seed=4)
    assert make_problems(5, seed=3) == make_problems(20, seed=3)[:5]


def test_problems_do_not_change_between_versions():
    # the shipped score is of these problems
    assert make_problems(1, seed=0, split="test")[0].prompt == "50+31+23+52+34+33+48+83+49+34+62="


@pytest.mark.parametrize("addends", [2, 8])
def test_splits_never_meet(addends):
    """Two addends give only 8100 prompts: streams that were merely seeded apart would collide."""
    train = {p.prompt for seed in range(3) for p in make_problems(2000, seed, addends, split="train")}
    test = {p.prompt for seed in range(3) for p in make_problems(500, seed, addends, split="test")}
    assert not train & test
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in test} == {"test"}


@pytest.mark.parametrize("addends", [2, 3, 8, 10])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_solution_earns_the_reward(addends, split):
    for problem in make_problems(100, seed=1, addends=addends, split=split):
        numbers = [int(number) for number in re.findall(r"\d+", problem.prompt)]
        assert len(numbers) == addends and all(10 <= number <= 99 for number in numbers)
        assert problem.prompt == "+".join(map(str, numbers)) + "="
        assert problem.answer == str(sum(numbers))
        assert grade(problem.solution, problem.answer) == 1.0


@pytest.mark.parametrize("addends", [2, 3, 11])
def test_every_written_step_is_right(addends):
    """Read back from the text alone: every expression has the same value and one number less than the one before."""
    for problem in make_problems(100, seed=2, addends=addends):
        expressions = (problem.prompt + problem.solution).split("=")
        assert len(expressions) == addends
        for before, after in pairwise(expressions):
            old, new = ([int(number) for number in text.split("+")] for text in (before, after))
            assert sum(new) == sum(old) and len(new) == len(old) - 1 and new[1:] == old[2:]


def test_responses_are_long_enough_to_evict():
    solutions = [problem.solution for problem in make_problems(200, seed=0)]
    assert sum(map(len, solutions)) / len(solutions) >= 150


@pytest.mark.parametrize(
    "text", ["", "=", "16", "1610", "162", " 161", "161\n", "161=", "161=162", "161<eos>", "0161", "1+160"]
)
def test_anything_but_the_exact_answer_earns_nothing(text):
    assert grade(text, "161") == 0.0


@pytest.mark.parametrize("text", ["161", "100+61=161", "12=161"])
def test_only_what_follows_the_last_mark_counts(text):
    assert grade(text, "161") == 1.0


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        make_problems(1, seed=0, addends=1)
    with pytest.raises(ValueError, match="'train' or 'test'"):
        make_problems(1, seed=0, split="validation")
