"""Question L of the evidence: several problems in one prompt, graded by the share that is right."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_rl.rewards.pool import RewardPool

FOLDER = Path(__file__).parents[1] / "experiments/evidence/l-long"
REWARD = f"{FOLDER / 'reward.py'}:share_right"
ANSWERS = ["7", "12", "1300", "4"]

WELL = "### Problem 1\n3+4=7, so \\boxed{7}\n\n### Problem 2\n\\boxed{12}\n\n### Problem 3\n\\boxed{\\$1,300}\n\n### Problem 4\n\\boxed{4}"


@pytest.fixture(scope="module")
def share():
    with RewardPool(REWARD, workers=1, timeout_s=10, truncated="grade") as pool:

        def grade(text, finish="stop"):
            graded = pool.grade(["…"], [text], {"answers": [ANSWERS], "finish": [finish]})
            assert graded.first_error is None
            return graded.values[0]

        yield grade


@pytest.mark.parametrize(
    ("right", "text"),
    [
        (4, WELL),
        (4, WELL.replace("### Problem", "**Problem").replace("\n3+4", ":**\n3+4")),
        (4, WELL.replace("### Problem", "#### problem")),
        (3, WELL.replace("\\boxed{12}", "12")),  # without a box there is no answer
        (3, WELL.replace("\\boxed{12}", "\\boxed{12}, no: it is \\boxed{13}")),  # the last box counts
        (4, WELL.replace("\\boxed{12}", "\\boxed{13}, no: it is \\boxed{12}")),
        (2, WELL.replace("### Problem 2\n", "")),  # the box of problem 2 is then the last of problem 1
        (4, WELL + "\n\n### Problem 2 again\n\\boxed{12}\n\n### Problem 17\n\\boxed{5}"),
        (0, "\\boxed{7} \\boxed{12} \\boxed{1300} \\boxed{4}"),
        (0, "### Problem 1\n\\boxed{12}\n### Problem 2\n\\boxed{7}\n### Problem 3\n\\boxed{4}\n### Problem 4\n\\boxed{1300}"),
        (0, "As in problem 1 \\boxed{7}, and the problem 2 of \\boxed{12}"),  # a heading starts its line
        (0, ""),
    ],
)
def test_the_reward_is_the_share_of_problems_right_under_their_own_heading(share, text, right):
    assert share(text) == right / 4


def test_a_response_that_was_cut_off_keeps_what_it_answered(share):
    cut = WELL[: WELL.index("### Problem 3")] + "### Problem 3\nThe answer is 1300"
    assert share(cut, "length") == 2 / 4


def test_prompts_are_made_again_the_same_and_share_no_problem(tmp_path):
    for split, count in (("train", 10), ("test", 7)):
        rows = [{"problem": f"{split} question {number}?", "answer": str(number)} for number in range(count)]
        with gzip.open(tmp_path / f"gsm8k-{split}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    made = []
    for out in (tmp_path / "one", tmp_path / "two"):
        command = [sys.executable, FOLDER / "make_data.py", tmp_path, "--problems", "3", "--out", out]
        subprocess.run(command, check=True, capture_output=True)
        made.append([(out / f"{split}.jsonl.gz").read_bytes() for split in ("train", "test")])
    assert made[0] == made[1]
    train, test = ([json.loads(line) for line in gzip.decompress(each).splitlines()] for each in made[0])
    assert (len(train), len(test)) == (3, 2)
    assert len({answer for row in train for answer in row["answers"]}) == 9
    for row in (*train, *test):
        for number, answer in enumerate(row["answers"], 1):
            assert f"### Problem {number}\n" in row["prompt"] and f"question {answer}?" in row["prompt"]
