"""The embedded task: continue a sequence in which every number is the sum of the previous two, modulo 100.

A prompt gives the number of sums to write and the first sum. The response writes all sums and counts down:

    15:47+85=                                    the prompt
    32 14:85+32=17 13:32+17=49 … 1:51+42=93      the response; the text after its last = is graded

Each line depends only on the previous line. A cache that keeps the last line can therefore continue indefinitely, and a cache
that evicts at random cannot. Each character is one token: fifteen sums take 162 tokens, which is long enough to evict. The
module is plain Python: it imports no torch and reads no files.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from ..config import Split

SUMS = 15
DIGITS = 2


@dataclass(frozen=True)
class Problem:
    first: int
    second: int
    prompt: str
    """Number of sums and the first sum without its result, e.g. `15:47+85=`."""
    answer: str
    """Last sum, spelled as the graded text must spell it."""
    solution: str
    """Complete worked response. It ends with the answer unless `slip` introduced an error."""


def make_problems(n: int, seed: int, sums: int = SUMS, split: Split = "train") -> list[Problem]:
    """Return `n` problems. The same arguments always give the same problems, and no prompt occurs in both splits."""
    if sums < 1:
        raise ValueError(f"sums = {sums} is invalid: it must be at least 1.")
    if split not in ("train", "test"):
        raise ValueError(f"split = {split!r} is invalid: use 'train' or 'test'.")
    rng = random.Random(f"{split}/{sums}/{seed}")
    problems: list[Problem] = []
    while len(problems) < n:
        problem = write_problem(rng.randrange(10**DIGITS), rng.randrange(10**DIGITS), sums)
        if split_of(problem.prompt) == split:
            problems.append(problem)
    return problems


def write_problem(first: int, second: int, sums: int, slip: Callable[[], int] = lambda: 0) -> Problem:
    """Return the problem that starts with these two numbers. `slip()` is added to each written sum; 0 means no error."""
    answer, (before, last) = 0, (first, second)
    for _ in range(sums):
        answer = (before + last) % 10**DIGITS
        before, last = last, answer
    lines, (before, last) = [], (first, second)
    for left in range(sums, 0, -1):
        total = (before + last + slip()) % 10**DIGITS
        lines.append(f"{left}:{before:0{DIGITS}}+{last:0{DIGITS}}={total:0{DIGITS}}")
        before, last = last, total
    prompt, mark, solution = " ".join(lines).partition("=")
    return Problem(first, second, prompt + mark, f"{answer:0{DIGITS}}", solution)


def split_of(prompt: str) -> Split:
    """Return the split of a prompt, chosen by its hash. One prompt in eight is held out. The splits are disjoint for every
    seed."""
    return "test" if hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % 8 == 0 else "train"


def grade(text: str, answer: str) -> float:
    """Return 1.0 if the text after the last `=` is exactly the answer, else 0.0."""
    return float(text.rpartition("=")[2] == answer)
