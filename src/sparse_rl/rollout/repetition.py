"""Repetition guard: end a rollout that only repeats itself. It is a stopping rule on tokens and is off by default."""

import numpy as np


class RepetitionGuard:
    """For each period p, counts how many of the latest tokens equal the token p positions before them."""

    def __init__(self, period: int, span: int):
        self._recent = np.full(period, -1, dtype=np.int64)  # newest first
        self._runs = np.zeros(period, dtype=np.int64)
        self._enough = span - np.arange(1, period + 1)

    def sees_repetition(self, token: int) -> bool:
        """Add a token. Return whether the last `span` tokens repeat with a period of at most `period`."""
        self._runs = np.where(self._recent == token, self._runs + 1, 0)
        self._recent = np.concatenate([[token], self._recent[:-1]])
        return bool((self._runs >= self._enough).any())
