"""The embedded task: problems repeat by seed, splits never meet, worked solutions are right, grading is exact."""

import re

import pytest

from sparse_rl.data.arithmetic import grade, make_problems, split_of


def test_same_arguments_make_the_same_problems():
    assert make_problems(20, seed=3) == make_problems(20, seed=3)
    assert make_problems(20, seed=3) != make_problems(20, seed=4)
    assert make_problems(5, seed=3) == make_problems(20, seed=3)[:5]


def test_problems_do_not_change_between_versions():
    # the shipped score is of these problems
    assert make_problems(1, seed=0, split="test")[0].prompt == "91+51+19+50+20+34+38+35="


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


@pytest.mark.parametrize("addends", [2, 8, 10])
def test_every_written_step_is_right(addends):
    """Read back from the text alone: column sums, carries as decimal digits, totals as sums of prefixes."""
    for problem in make_problems(100, seed=2, addends=addends):
        numbers = [int(number) for number in problem.prompt[:-1].split("+")]
        *lines, last = problem.solution.split("\n")
        assert len(lines) == addends - 1
        for i, line in enumerate(lines):
            task, units, tens, total = line.split(";")
            assert task == f"{sum(numbers[: i + 1])}+{numbers[i + 1]}"
            assert int(total) == sum(numbers[: i + 2])
            for column in (units, tens):
                terms, result = column.split("=")
                assert sum(map(int, terms.split("+"))) == int(result)
            old, addend = task.split("+")
            assert units.split("=")[0] == f"{old[-1]}+{addend[-1]}"
            carry = units.split("=")[1].zfill(2)[0]
            assert tens.split("=")[0] == f"{old[:-1]}+{addend[0]}+{carry}"
            assert total == tens.split("=")[1] + units.split("=")[1][-1]
        assert last == f"#{problem.answer}"


def test_responses_are_long_enough_to_evict():
    solutions = [problem.solution for problem in make_problems(200, seed=0)]
    assert sum(map(len, solutions)) / len(solutions) >= 150


@pytest.mark.parametrize(
    "text", ["", "161", "#", "#16", "#1610", "#162", "# 161", "#161\n", "#161#", "#161#162", "#161<eos>", "#0161"]
)
def test_anything_but_the_exact_answer_earns_nothing(text):
    assert grade(text, "161") == 0.0


@pytest.mark.parametrize("text", ["#161", "no steps at all#161", "#12\n#161"])
def test_only_what_follows_the_last_mark_counts(text):
    assert grade(text, "161") == 1.0


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        make_problems(1, seed=0, addends=1)
    with pytest.raises(ValueError, match="'train' or 'test'"):
        make_problems(1, seed=0, split="validation")
