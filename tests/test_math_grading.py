r"""Grading: gold against `\boxed{gold}` is right, another gold is wrong, loose matches are refused, hostile answers do no harm."""

import gzip
import json
import random
from pathlib import Path

import pytest

import hostile_answers
from hostile import ENDLESS, wrong
from sparse_rl.config import TASK_REWARDS, TASKS
from sparse_rl.rewards import answers
from sparse_rl.rewards.functions import last_number
from sparse_rl.rewards.integers import integer_answer
from sparse_rl.rewards.math import math_answer
from sparse_rl.rewards.pool import RewardPool

GOLDS = json.loads(gzip.decompress((Path(__file__).parent / "data" / "golds.json.gz").read_bytes()))
"""The answers of every row of the tasks' files, in order; see data/README.md."""
FILES = {
    "simplerl-zoo-hard-train": "math_answer",
    "gsm8k-train": "integer_answer",
    "gsm8k-test": "integer_answer",
    "math500": "math_answer",
    "gaokao2023en": "math_answer",
    "minerva-math": "math_answer",
    "olympiadbench-math-en": "math_answer",
    "aime24": "integer_answer",
    "amc23": "integer_answer",
}
EMPTY = {"simplerl-zoo-hard-train": {5054, 5158}, "gaokao2023en": {167, 192}}


def math_verdict(answer, gold):
    return math_answer(["?"], [f"Therefore $\\boxed{{{answer}}}$."], answer=[gold])[0]


def integer_verdict(answer, gold):
    return integer_answer(["?"], [f"Therefore $\\boxed{{{answer}}}$."], answer=[gold])[0]


@pytest.mark.parametrize("name", FILES)
def test_every_gold_in_a_box_is_right_but_for_the_empty_ones(name):
    grade = math_verdict if FILES[name] == "math_answer" else integer_verdict
    verdicts = [grade(gold, gold) for gold in GOLDS[name]]
    assert {row for row, verdict in enumerate(verdicts) if verdict is None} == EMPTY.get(name, set())
    assert {verdict for verdict in verdicts if verdict is not None} == {1.0}


SHUFFLED = ("math500", "gaokao2023en", "minerva-math", "olympiadbench-math-en", "simplerl-zoo-hard-train")


def test_a_shuffled_gold_is_wrong():
    """Of 400 pairs with different texts at most 4 grade right: the same value in other words (docs/train-your-own.md has the counts)."""
    pairs = []
    for name in SHUFFLED:
        rows = [gold for gold in GOLDS[name] if gold]
        shuffled = random.Random(0).sample(rows, len(rows))
        pairs += [(one, other) for one, other in zip(rows, shuffled, strict=True) if one != other][:80]
    texts = [f"\\boxed{{{other}}}" for _, other in pairs]
    with RewardPool("math_answer", workers=1, timeout_s=20) as pool:
        graded = pool.grade(["?"] * len(pairs), texts, {"answer": [one for one, _ in pairs]})
    assert (graded.no_verdict, graded.timeouts, graded.errors) == (0, 0, 0), graded.first_error
    right = [pair for pair, value in zip(pairs, graded.values, strict=True) if value]
    assert len(pairs) == 400 and len(right) <= 4, right


@pytest.mark.parametrize("name", [name for name, function in FILES.items() if function == "integer_answer"])
def test_a_shuffled_integer_is_wrong(name):
    rows = GOLDS[name]
    for one, other in zip(rows, random.Random(0).sample(rows, len(rows)), strict=True):
        assert integer_verdict(other, one) == float(one == other)


def test_hostile_answers_do_not_hang_crash_or_count_as_right():
    assert len(wrong()) >= 200
    for pairs, timeout_s, timeouts, verdict in ((wrong(), 60, 0, 0.0), (ENDLESS, 1, len(ENDLESS), None)):
        with RewardPool("math_answer", workers=2, timeout_s=timeout_s) as pool:
            graded = pool.grade(["?"] * len(pairs), [text for text, _ in pairs], {"answer": [gold for _, gold in pairs]})
        assert (graded.no_verdict, graded.timeouts, graded.errors) == (0, timeouts, 0), graded.first_error
        for (text, gold), value in zip(pairs, graded.values, strict=True):
            assert value == verdict, (text[:200], gold, value)


@pytest.mark.parametrize("grader", ["integer_answer", "math_answer", "last_number"])
def test_answers_known_to_be_right_or_wrong(grader, tmp_path, monkeypatch):
    """A slice of experiments/faults/answers.py, without what may run out of time."""
    monkeypatch.chdir(tmp_path)
    drawn = [each for each in hostile_answers.answers(200, seed=1) if each.grader == grader and not each.endless]
    columns = {name: [getattr(each, name) for each in drawn] for name in ("finish", "in_thought")}
    with RewardPool(grader, workers=1, timeout_s=20) as pool:
        graded = pool.grade(
            ["?"] * len(drawn), [each.text for each in drawn], columns | {"answer": [each.gold for each in drawn]}
        )
    for each, value in zip(drawn, graded.values, strict=True):
        assert value == float(each.right), (each.kind, each.text[:200], each.gold)
    assert len(drawn) >= 10 and {each.right for each in drawn} == {True, False}
    assert not (tmp_path / hostile_answers.RAN).exists()


def test_hostile_answers_to_integer_problems_are_wrong():
    texts = [text for text, gold in wrong() if gold == "5"]
    assert set(integer_answer(["?"] * len(texts), texts, answer=["5"] * len(texts))) == {0.0}


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "9=5"),
        ("5", "\\{5\\}"),
        ("5", "[5,5]"),
        ("5", "5,6"),
        ("5", "5 \\text{ or } 6"),
        ("[2,5)", "2 < x < 5"),
        ("2x+3", "x=2x+3"),
        ("2", "1<x<3"),
        ("\\sqrt{2}", "\\{\\sqrt{2}\\}"),
        ("(1,2)", "\\{1,2\\}"),
        ("\\{1,2\\}", "(1,2)"),
        ("(1,2)", "(2,1)"),
        ("1e-8", "0"),
        ("4.6e-24", "4.6 \\times 10^{-28} \\text{ m}"),
        ("101_2", "101_3"),
        ("101_2", "101_{3}"),
        ("0", "1e-8"),
        ("0", "0.0000001\\pi"),
        ("b > a > c", "b > c > a"),
        ("east", "seat"),
        ("11/2", "1 1/2"),
        ("\\frac{1}{3}", "0.33"),
        ("1000000", "1000000.5"),
        ("5", "\\gcd(9^{9^9},5)"),
        ("5", "\\binom{9^{9^9}}{5}"),
    ],
)
def test_loose_matches_are_refused(gold, answer):
    assert math_verdict(answer, gold) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "5.0"),
        ("5", "\\sqrt{25}"),
        ("5", "5\\text{ cm}"),
        ("\\frac{1}{2}", "0.5"),
        ("\\frac{1}{3}", "0.333333"),
        ("4.5e33", "4.5 \\times 10^{33}"),
        ("1e-8", "10^{-8}"),
        ("25", "25\\%"),
        ("10,\\!080", "10080"),
        ("90^\\circ", "90"),
        ("90^\\circ", "90°"),
        ("20 cm^{2}", "20"),
        ("10", "10 cm^2"),
        ("101_2", "101_{2}"),
        ("9\\sqrt{2}", "\\sqrt{162}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("0", "\\sqrt{2}\\sqrt{3}-\\sqrt{6}"),
        ("0", "(x+1)^2-x^2-2x-1"),
        ("0", "\\sin(\\pi)"),
        ("4.6e-24", "4.6 \\times 10^{-24} \\text{ m}"),
        ("36\\pi", "113.097336"),
        ("-3, 3", "\\pm 3"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("(1,2)", "1, 2"),
        ("x=9", "9"),
        ("y=-2x+5", "-2x+5"),
        ("-2x+5", "y=-2x+5"),
        ("-2x+5", "f(x) = -2x+5"),
        ("x>3", "(3,\\infty)"),
        ("(3,\\infty)", "x>3"),
        ("[2,5)", "2 \\le x < 5"),
        ("\\text{east}", "East"),
        ("abc", "cab"),
        ("\\text{even}", "Even."),
        ("\\frac{100!}{2^{50}}", "100!/2^{50}"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    ],
)
def test_the_same_answer_in_other_words_is_right(gold, answer):
    assert math_verdict(answer, gold) == 1.0


@pytest.mark.parametrize(
    ("answer", "integers", "mathematics"),
    [
        ("x = 25", 1.0, 1.0),
        ("m+n = 25", 1.0, 1.0),
        ("25 = m + n", 1.0, 1.0),
        ("100m + n = 25", 1.0, 1.0),
        ("\\frac{m}{n} = 25", 1.0, 1.0),
        ("x = y = 25", 1.0, 1.0),
        ("f(2) = 25", 1.0, 1.0),
        ("P(X = 3) = 25", 1.0, 1.0),
        ("a_{10} = 25", 1.0, 1.0),
        ("\\angle ABC = 25^\\circ", 1.0, 1.0),
        ("\\text{Area} = 25\\text{ cm}^2", 1.0, 1.0),
        ("x = \\boxed{25}", 1.0, 1.0),
        ("m+n = 12 + 13 = 25", 1.0, 1.0),
        ("30 - 5 = 25", 1.0, 1.0),
        ("m+n = 12+14 = 25", 0.0, 0.0),
        ("m+n = 12+13", 0.0, 1.0),  # to be worked out: a value to mathematics only
        ("x = 5^2", 0.0, 1.0),
        ("9 = 25", 0.0, 0.0),
        ("x = 24 = 25", 0.0, 0.0),
        ("x = 25 = 26", 0.0, 0.0),
        ("x = 25, y = 3", 0.0, 0.0),
        ("x = 25, y = 25", 0.0, 0.0),
        ("x = 25 \\text{ and } y = 25", 0.0, 0.0),
        ("x = 25; x = 7", 0.0, 0.0),
        ("x = 25, 26", 0.0, 0.0),
        ("x = 25 \\text{ or } 26", 0.0, 0.0),
        ("x = \\pm 25", 0.0, 0.0),
        ("x = -25", 0.0, 0.0),
        ("x = \\{25\\}", 0.0, 0.0),
        ("(x, y) = 25", 0.0, 0.0),
        ("2x = 25", 0.0, 0.0),  # these have yet to be solved
        ("x + 1 = 25", 0.0, 0.0),
        ("x^2 = 25", 0.0, 0.0),
        ("-x = 25", 0.0, 0.0),
        ("x = 25x", 0.0, 0.0),
        ("x = y", 0.0, 0.0),
        ("\\pi = 25", 0.0, 0.0),
        ("x \\neq 25", 0.0, 0.0),
        ("x != 25", 0.0, 0.0),
        ("x \\le 25", 0.0, 0.0),
        ("x <= 25", 0.0, 0.0),
        ("x > 24 = 25", 0.0, 0.0),
        ("x = 25 > 24", 0.0, 0.0),
        ("25 = " * 200 + "25", 0.0, 0.0),
    ],
)
def test_an_equation_counts_where_it_only_names_the_number(answer, integers, mathematics):
    assert integer_verdict(answer, "25") == integers
    assert math_verdict(answer, "25") == mathematics


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("\\sqrt{2}", "x=\\sqrt{2}", 1.0),
        ("\\frac{1}{2}", "e = 0.5", 1.0),
        ("\\frac{1}{2}", "e = 0.6", 0.0),
        ("-1./3", "x = -1./3", 1.0),
        ("-1./3", "x = 1/3", 0.0),
        ("x=25", "x=25", 1.0),  # a gold with a symbol is compared with it
        ("x=25", "y=25", 0.0),
        ("2x+3", "y=2x+3", 1.0),
        ("2x+3", "x=2x+3", 0.0),
        ("\\{1,2\\}", "x=1", 0.0),
        ("1, 2", "x=1, 2", 1.0),
        ("1, 2", "x=1", 0.0),
    ],
)
def test_equations_beside_golds_that_are_no_integers(gold, answer, verdict):
    assert math_verdict(answer, gold) == verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("1234", 1.0),
        ("1,234", 1.0),
        ("1{,}234", 1.0),
        ("1234.00", 1.0),
        ("\\$1,234.00", 1.0),
        ("01234", 1.0),
        ("+1234", 1.0),
        ("1234\\text{ dollars}", 1.0),
        ("1234 cm^2", 1.0),
        ("1234\\%", 1.0),
        ("\\mathbf{1234}", 1.0),
        ("\\text{1234 \\textbf{dollars}}", 1.0),
        ("\\$+1234", 1.0),
        ("1234 m", 1.0),
        ("1234x", 0.0),
        ("\\$-1234", 0.0),
        ("1234.5", 0.0),
        ("-1234", 0.0),
        ("12,34", 0.0),
        ("x=1234", 1.0),
        ("1234 or more", 0.0),
        ("1234, 1235", 0.0),
        ("1234+0", 0.0),
        ("1234^{9^{9}}", 0.0),
        ("\\frac{2468}{2}", 0.0),
        ("9" * 1_000_000, 0.0),
        ("", 0.0),
    ],
)
def test_integers_are_compared_as_integers(answer, verdict):
    assert integer_verdict(answer, "1234") == verdict


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{3}. No: \\boxed{5}", "5"),
        ("\\boxed{3} or \\boxed{5}", "3, 5"),
        ("$\\boxed{3}$, $\\boxed{5}$ \\text{and} $\\boxed{7}$", "3, 5, 7"),
        ("\\(\\boxed{3}\\) and \\(\\boxed{5}\\)", "3, 5"),
        ("\\[\\boxed{3}\\]\n\n\\[\\boxed{5}\\]", "3, 5"),
        ("**\\boxed{3}** or **\\boxed{5}**", "3, 5"),
        ("\\boxed{5}, \\boxed{5}", "5"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{ \\fbox{ \\boxed{5} } }", "5"),
        ("\\boxed{\\boxed{5}+1000}", "{5}+1000"),
        ("\\boxed{7} no \\boxed{x = \\boxed{5}}", "x = {5}"),
        ("\\boxed{\\boxed{5} or \\boxed{6}}", "{5} or {6}"),
        ("\\boxed{\\boxed{5}+1000", ""),
        ("\\boxed{5} so \\boxed{7", ""),
        ("\\boxed{5} so \\boxed{7\n\nThat is all.", ""),
        ("\\boxed{\\frac{7}{2} no\n\n\\boxed{5}", "5"),
        ("\\boxed{6}" + "\\boxed{5}" * 30, "6, 5"),
        ("if (x) { \\boxed{5} it is", "5"),
        ("\\\\[ \\\\boxed{5} \\\\]", "5"),
        ("\\boxed{\\{5\\}}", "\\{5\\}"),
        ("\\boxed {5}", "5"),
        ("\\fbox{5}", "5"),
        ("\\boxed{5", ""),
        ("\\boxed{}", ""),
        ("five", None),
    ],
)
def test_the_last_box_that_closes_is_the_answer(text, content):
    assert answers.boxed(text) == content


@pytest.mark.parametrize(
    ("text", "whole", "mathematics"),
    [
        ("The answer is 5.", 1.0, 1.0),
        ("#### 5", 1.0, 1.0),
        ("The answer is -5.", 0.0, 0.0),
        ("#### -5", 0.0, 0.0),
        ("Answer: $-5$", 0.0, 0.0),
        ("answer is **5**", 1.0, None),
        ("The answer is 5 dollars for 3 days.", 1.0, None),
        ("so $\\frac{10}{2}$", None, 1.0),
        ("is the weight of \\(\\frac{3}{5}\\) of", 0.0, None),
        ("= 2^5 \\cdot", 0.0, None),
        ("since z_5 must be", 0.0, None),
        ("The answer is 5/2.", 0.0, None),
        ("It costs $\\mathbf{5}$/day", 1.0, None),
        ("an angle of 5^\\circ", 1.0, None),
        ("5", 1.0, 1.0),
        ("So $x = 5$.", 1.0, 1.0),
        ("It is 7", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("no idea", 0.0, 0.0),
    ],
)
def test_without_a_box_the_announced_or_last_number_counts(text, whole, mathematics):
    if whole is not None:
        assert integer_answer(["?"], [text], answer=["5"]) == [whole]
    if mathematics is not None:
        assert math_answer(["?"], [text], answer=["5"]) == [mathematics]


CUT = "First compute 6*3 = 18. Then we subtract"


@pytest.mark.parametrize("grade", [math_answer, integer_answer, last_number])
@pytest.mark.parametrize(
    ("text", "finish", "in_thought", "verdict"),
    [
        (CUT, "stop", False, 1.0),
        (CUT, "length", False, 0.0),
        (CUT, "repetition", False, 0.0),
        (CUT, "stop", True, 0.0),
        ("The answer is 18", "stop", False, 1.0),
        ("The answer is 18", "length", False, 0.0),  # perhaps of 180
        ("18", "length", False, 0.0),
        ("<think>It is 18", "stop", False, 0.0),
        ("<think>It is 18", "length", False, 0.0),
        ("<think>It is 7.</think>It is 18", "stop", False, 1.0),
        ("It is 7.</think>It is 18", "stop", False, 1.0),
        ("It is 7.</think>It is 18", "stop", True, 1.0),
        ("It is 18.</think>It is 7", "stop", False, 0.0),
        ("It is 18.</think>", "stop", False, 0.0),
        ("<think>It is 18.</think>", "stop", False, 0.0),
        ("<think>a</think>It is 18. <think>Or", "stop", False, 0.0),
    ],
)
def test_the_last_number_counts_only_where_a_text_has_ended(grade, text, finish, in_thought, verdict):
    assert grade(["?"], [text], answer=["18"], finish=[finish], in_thought=[in_thought]) == [verdict]


@pytest.mark.parametrize("grade", [math_answer, integer_answer])
@pytest.mark.parametrize(
    ("text", "in_thought", "verdict"),
    [
        ("\\boxed{18} it is", False, 1.0),
        ("\\boxed{18} it is", True, 0.0),
        ("<think>\\boxed{18} it is", False, 0.0),
        ("<think>\\boxed{18}</think>", False, 0.0),
        ("\\boxed{18}</think> so", False, 0.0),
        ("\\boxed{18}</think>", True, 0.0),
        ("\\boxed{7}</think>\\boxed{18}", False, 1.0),
        ("\\boxed{7}</think>\\boxed{18}", True, 1.0),
        ("\\boxed{18}</think>\\boxed{7}", True, 0.0),
        ("<think>a</think>\\boxed{18}", False, 1.0),
        ("<think>a</think>\\boxed{18}", True, 1.0),
        ("<think>a</think>\\boxed{7} <think>\\boxed{18}", False, 0.0),
        ("<think>a</think>\\boxed{18} <think>\\boxed{7}", False, 1.0),
        ("\\boxed{7}<think>No.</think>\\boxed{18}", False, 1.0),
    ],
)
@pytest.mark.parametrize("finish", ["stop", "length", "repetition"])
def test_a_box_counts_outside_of_thoughts(grade, text, in_thought, finish, verdict):
    assert grade(["?"], [text], answer=["18"], finish=[finish], in_thought=[in_thought]) == [verdict]


def test_a_gold_that_cannot_be_used_gives_no_verdict():
    assert math_answer(["?"] * 2, ["\\boxed{5}"] * 2, answer=["", "  "]) == [None, None]
    assert integer_answer(["?"] * 2, ["\\boxed{5}"] * 2, answer=["", "five"]) == [None, None]


def test_completions_may_be_messages():
    message = [{"role": "assistant", "content": "\\boxed{5}"}]
    assert math_answer(["?"], [message], answer=["5"]) == integer_answer(["?"], [message], answer=["5"]) == [1.0]


def test_every_task_has_its_reward():
    integers = {"gsm8k", "aime24", "amc23"}
    assert set(TASK_REWARDS) == set(TASKS)
    for name in set(TASKS) - {"arithmetic"}:
        assert TASK_REWARDS[name] == ("integer_answer" if name in integers else "math_answer")
