"""Order of problems in training. The number of problems seen so far is the only state needed to resume."""

import random
from functools import lru_cache


class Order:
    """Endless stream of indices below `n`. Each epoch contains every index once, in a new order.

    The stream is a pure function of (n, seed, cursor) and is the same on every machine. `take` may cross the end of an epoch.
    """

    def __init__(self, n: int, seed: int):
        if n < 1:
            raise ValueError(f"n = {n} is invalid: it must be at least 1.")
        self.n, self.seed = n, seed

    def take(self, cursor: int, count: int) -> list[int]:
        """Return entries cursor, …, cursor + count - 1 of the stream."""
        return [shuffled(self.n, self.seed, at // self.n)[at % self.n] for at in range(cursor, cursor + count)]


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    # Sort by random(): Python guarantees its sequence across versions, but not that of shuffle().
    rng = random.Random(f"order/{seed}/{epoch}")
    return tuple(sorted(range(n), key=lambda _: rng.random()))
