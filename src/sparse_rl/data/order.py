"""The order of problems in training. The number of problems seen so far is enough to resume."""

import random
from functools import lru_cache


class Order:
    """An endless stream of the indices below `n`. Each epoch contains every index once, in a new order.

    A pure function of (n, seed, cursor), the same on every machine. Near the end of an epoch `take` may reach into the next.
    """

    def __init__(self, n: int, seed: int):
        if n < 1:
            raise ValueError(f"n = {n} leaves nothing to order: it must be at least 1.")
        self.n, self.seed = n, seed

    def take(self, cursor: int, count: int) -> list[int]:
        """Return entries cursor, …, cursor + count - 1 of the stream."""
        return [shuffled(self.n, self.seed, at // self.n)[at % self.n] for at in range(cursor, cursor + count)]


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    # sorted by random(), because Python promises the same sequence in every version; shuffle() has no such promise
    rng = random.Random(f"order/{seed}/{epoch}")
    return tuple(sorted(range(n), key=lambda _: rng.random()))
