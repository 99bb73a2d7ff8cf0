"""The embedded task: problems repeat by seed, splits never meet, worked solutions are right, grading is exact."""

import re
from itertools import pairwise

import pytest

from sparse_rl.data.arithmetic import SUMS, grade, make_problems, split_of


def test_same_arguments_make_the_same_problems():
    assert make_problems(20, seed=3) == make_problems(20, seed=3)
    assert make_problems(20, seed=3) != make_problems(20, seed=4)
    assert make_problems(5, seed=3) == make_problems(20, seed=3)[:5]


def test_problems_do_not_change_between_versions():
    # the shipped score is of these problems
    problems = make_problems(3, seed=0, split="test")
    assert [(problem.prompt, problem.answer) for problem in problems] == [
        ("15:18+99=", "93"),
        ("15:63+32=", "14"),
        ("15:60+11=", "57"),
    ]


@pytest.mark.parametrize("sums", [1, SUMS])
def test_splits_never_meet(sums):
    """There are only 10,000 prompts of a length: streams that were merely seeded apart would collide."""
    train = {problem.prompt for seed in range(3) for problem in make_problems(2000, seed, sums, split="train")}
    test = {problem.prompt for seed in range(3) for problem in make_problems(500, seed, sums, split="test")}
    assert not train & test
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in test} == {"test"}


@pytest.mark.parametrize("sums", [1, 2, SUMS, 40])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_written_line_is_right(sums, split):
    """Read back from the text alone: sums are right, the counter counts down, a line adds the last two numbers written."""
    for problem in make_problems(100, seed=2, sums=sums, split=split):
        lines = [re.fullmatch(r"(\d+):(\d\d)\+(\d\d)=(\d\d)", line) for line in (problem.prompt + problem.solution).split(" ")]
        assert all(lines)
        numbers = [[int(number) for number in line.groups()] for line in lines]
        assert [counter for counter, *_ in numbers] == list(range(sums, 0, -1))
        assert all(total == (first + second) % 100 for _, first, second, total in numbers)
        assert all(new[1:3] == old[2:4] for old, new in pairwise(numbers))


@pytest.mark.parametrize("sums", [1, 2, SUMS])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_solution_earns_the_reward(sums, split):
    for problem in make_problems(100, seed=1, sums=sums, split=split):
        assert re.fullmatch(rf"{sums}:\d\d\+\d\d=", problem.prompt)
        assert problem.solution.endswith(problem.answer) and len(problem.answer) == 2
        assert grade(problem.solution, problem.answer) == 1.0


def test_responses_are_long_enough_to_evict():
    assert min(len(problem.solution) for problem in make_problems(200, seed=0)) >= 150


@pytest.mark.parametrize(
    "text", ["", "=", "6", "061", "16", "611", "62", " 61", "61\n", "61=", "61=62", "61<eos>", "1:30+31", "1:30+31=61 "]
)
def test_anything_but_the_exact_answer_earns_nothing(text):
    assert grade(text, "61") == 0.0


@pytest.mark.parametrize("text", ["61", "1:30+31=61", "99 2:12+99=61"])
def test_only_what_follows_the_last_mark_counts(text):
    assert grade(text, "61") == 1.0


def test_an_answer_keeps_its_leading_zero():
    assert grade("1:99+06=05", "05") == 1.0
    assert grade("1:99+06=5", "05") == 0.0


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        make_problems(1, seed=0, sums=0)
    with pytest.raises(ValueError, match="'train' or 'test'"):
        make_problems(1, seed=0, split="validation")
