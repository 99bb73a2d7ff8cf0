"""Repetition guard: end a rollout that only repeats itself. It is a stopping rule on tokens and is off by default."""

# S sequences, n tokens of a chunk, P periods

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


class RepetitionGuard:
    """State of one sequence: its last tokens, and for each period p how many of them equal the token p places before."""

    def __init__(self, period: int, span: int):
        self.recent_P = np.full(period, -1, dtype=np.int64)  # oldest first
        self.runs_P = np.zeros(period, dtype=np.int32)
        self.enough_P = (span - np.arange(1, period + 1)).astype(np.int32)


def first_repetitions(guards: Sequence[RepetitionGuard], tokens_Sn: np.ndarray) -> np.ndarray:
    """Add a chunk of tokens to each guard. Return for each sequence the index of the first token with which its last `span`
    tokens repeat with a period of at most `period`, or n if there is none."""
    count, periods = tokens_Sn.shape[1], len(guards[0].recent_P)
    text = np.concatenate([np.stack([guard.recent_P for guard in guards]), tokens_Sn], axis=1)
    before_SnP = sliding_window_view(text[:, :-1], periods, axis=1)[:, :, ::-1]  # the token p places before, p = 1 first
    step_n1 = np.arange(1, count + 1, dtype=np.int32)[:, None]
    missed_SnP = np.maximum.accumulate(np.where(before_SnP == tokens_Sn[:, :, None], np.int32(0), step_n1), axis=1)
    earlier_S1P = np.stack([guard.runs_P for guard in guards])[:, None]
    runs_SnP = step_n1 - missed_SnP + np.where(missed_SnP == 0, earlier_S1P, 0)
    for guard, recent_P, runs_P in zip(guards, text[:, -periods:], runs_SnP[:, -1], strict=True):
        guard.recent_P, guard.runs_P = recent_P, runs_P
    repeats_Sn = np.any(runs_SnP >= guards[0].enough_P, axis=2)
    return np.where(repeats_Sn.any(axis=1), repeats_Sn.argmax(axis=1), count)
