"""The embedded task: running sums with written steps.

A problem is a chain of two-digit addends. Its worked solution adds one addend a line, by columns:

    47+85+29=                      the prompt
    47+85;7+5=12;4+8+1=13;132      units; the rest of the total + tens + carry; the new total
    132+29;2+9=11;13+2+1=16;161
    #161                           the graded answer

Every line must look back into the prompt for its addend, so a cache that forgets the prompt fails here; and with
one token per character eight addends take about 190 tokens, long enough to evict. Plain Python, no torch, no files.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Problem:
    prompt: str
    """The addends, as in `47+85+29=`."""
    answer: str
    """The sum, as the graded text must spell it."""
    solution: str
    """A whole worked response; it ends in `#` and the answer."""


def make_problems(n: int, seed: int, addends: int = 8, split: Split = "train") -> list[Problem]:
    """`n` problems, the same ones for the same arguments; no prompt of one split ever occurs in the other."""
    if addends < 2:
        raise ValueError(f"addends = {addends} leaves nothing to add: it must be at least 2.")
    if split not in ("train", "test"):
        raise ValueError(f"split = {split!r} is unknown: it is 'train' or 'test'.")
    rng = random.Random(f"{split}/{addends}/{seed}")
    problems: list[Problem] = []
    while len(problems) < n:
        problem = write_problem([rng.randint(10, 99) for _ in range(addends)])
        if split_of(problem.prompt) == split:
            problems.append(problem)
    return problems


def write_problem(numbers: list[int]) -> Problem:
    total, lines = numbers[0], []
    for addend in numbers[1:]:
        lines.append(write_step(total, addend))
        total += addend
    return Problem("+".join(map(str, numbers)) + "=", str(total), "".join(lines) + f"#{total}")


def write_step(total: int, addend: int) -> str:
    """One line: 132 and 29 give `132+29;2+9=11;13+2+1=16;161`."""
    rest, units = divmod(total, 10)
    tens, ones = divmod(addend, 10)
    carry = (units + ones) // 10
    by_units = f"{units}+{ones}={units + ones}"
    by_tens = f"{rest}+{tens}+{carry}={rest + tens + carry}"
    return f"{total}+{addend};{by_units};{by_tens};{total + addend}\n"


def split_of(prompt: str) -> Split:
    """The prompt's own hash decides its split, one in eight is held out: no seed can make the two overlap."""
    return "test" if hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % 8 == 0 else "train"


def grade(text: str, answer: str) -> float:
    """1.0 if what follows the last `#` is exactly the answer, else 0.0."""
    _, mark, given = text.rpartition("#")
    return float(bool(mark) and given == answer)
