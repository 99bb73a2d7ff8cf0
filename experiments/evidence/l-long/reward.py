"""Reward of question L: the share of a prompt's problems whose answer is right.

A row's column `answers` lists the integers of its problems. The answer to problem 3 is the last box under the heading
"Problem 3". Without a box there is no answer. Cut-off responses keep the credit of the problems they reached, if
reward.truncated = "grade".
"""

import re
from itertools import pairwise

from sparse_rl.rewards.integers import integer_answer

HEADING = re.compile(r"^[ \t#*_>-]*problem[ \t]*#?(\d{1,4})\b", re.IGNORECASE | re.MULTILINE)
"""A line that starts with "Problem 3", as heading of any level, bold or plain."""


def sections(text: str) -> dict[int, str]:
    """Return the text under each problem's heading. Sections with the same number are joined."""
    found: dict[int, str] = {}
    for heading, following in pairwise([*HEADING.finditer(text), None]):
        number, end = int(heading[1]), following.start() if following else len(text)
        found[number] = found.get(number, "") + text[heading.end() : end]
    return found


def share_right(prompts, completions, answers, **columns):
    """Return the share of right answers for each completion: 1 for all problems, 0.5 for half of them."""
    rewards = []
    for completion, right in zip(completions, answers, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        under = sections(text)
        written = [under.get(number, "") for number in range(1, len(right) + 1)]
        # "length" is how a cut-off text ends: it makes the grader ask for a box
        verdicts = integer_answer([""] * len(right), written, right, finish=["length"] * len(right))
        rewards.append(sum(verdicts) / len(verdicts))
    return rewards
