"""The embedded task: long sums by rewriting.

A problem is a chain of two-digit addends. Its worked solution adds the first two, writes down what is left, and so on:

    47+85+29+63=                   the prompt
    132+29+63=161+63=224           the response; what follows its last = is graded

Every step reads the expression before it: one number to work out, the others to copy. What lies further back is said
again by what came later, as in the drafts of a person. So a cache that keeps the last expression can solve it, one that
forgets at random cannot; and with one token per character eleven addends take about 170 tokens, long enough to evict.
Plain Python, no torch, no files.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]
ADDENDS = 11


@dataclass(frozen=True)
class Problem:
    prompt: str
    """The addends, as in `47+85+29+63=`."""
    answer: str
    """The sum, as the graded text must spell it."""
    solution: str
    """A whole worked response; it ends in the answer."""


def make_problems(n: int, seed: int, addends: int = ADDENDS, split: Split = "train") -> list[Problem]:
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
    expressions = [numbers]
    while len(expressions[-1]) > 1:
        first, second, *rest = expressions[-1]
        expressions.append([first + second, *rest])
    prompt, *steps = ["+".join(map(str, expression)) for expression in expressions]
    return Problem(prompt + "=", steps[-1], "=".join(steps))


def split_of(prompt: str) -> Split:
    """The prompt's own hash decides its split, one in eight is held out: no seed can make the two overlap."""
    return "test" if hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % 8 == 0 else "train"


def grade(text: str, answer: str) -> float:
    """1.0 if what follows the last `=` is exactly the answer, else 0.0."""
    return float(text.rpartition("=")[2] == answer)
