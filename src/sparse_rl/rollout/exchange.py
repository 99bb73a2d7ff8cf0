"""Graded rollouts in a few arrays, as ranks exchange them: eight bytes per response token.

Prompts and seeds are not sent, because every rank knows them by the index of a rollout. Traces and texts stay on the rank that
sampled.
"""

# B rollouts, N response tokens of all of them

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch

from ..kv.storage import Quantiser
from ..rewards.batch import Graded
from .graded import GradedRollouts
from .rollout import Finish, Rollout
from .stats import Stats

FINISHES: tuple[Finish, ...] = get_args(Finish)


@dataclass(frozen=True)
class RolloutArrays:
    """Graded rollouts of one rank."""

    places_B: np.ndarray
    lengths_B: np.ndarray
    finishes_B: np.ndarray
    """Index of each rollout's `finish` in `FINISHES`."""
    kv_peaks_B: np.ndarray
    tokens_N: np.ndarray
    logprobs_N: np.ndarray
    temperature: float
    graded: Graded
    stats: Stats
    grade_s: float


def to_arrays(part: GradedRollouts) -> RolloutArrays:
    rollouts = part.rollouts
    return RolloutArrays(
        places_B=np.array(part.places, dtype=np.int32),
        lengths_B=np.array([len(rollout.response) for rollout in rollouts], dtype=np.int32),
        finishes_B=np.array([FINISHES.index(rollout.finish) for rollout in rollouts], dtype=np.uint8),
        kv_peaks_B=np.array([rollout.kv_peak for rollout in rollouts], dtype=np.int32),
        tokens_N=_joined([np.array(rollout.response, dtype=np.int32) for rollout in rollouts], np.int32),
        logprobs_N=_joined([rollout.logprobs.numpy() for rollout in rollouts], np.float32),
        temperature=rollouts[0].temperature if rollouts else 1.0,
        graded=part.graded,
        stats=part.stats,
        grade_s=part.grade_s,
    )


def from_arrays(
    arrays: RolloutArrays,
    prompts: Sequence[list[int]],
    samples: int,
    seeds: Sequence[int],
    quantiser: Quantiser | None = None,
) -> GradedRollouts:
    """Return the rollouts, without texts and traces. `prompts`, `samples` and `seeds` are those of `sample_and_grade`. The
    engines of all ranks have the same quantiser."""
    ends_B = np.cumsum(arrays.lengths_B, dtype=np.int64)
    rollouts = [
        Rollout(
            prompt=prompts[place // samples],
            response=arrays.tokens_N[end - length : end].tolist(),
            logprobs=torch.from_numpy(arrays.logprobs_N[end - length : end]),
            finish=FINISHES[finish],
            kv_peak=int(kv_peak),
            temperature=arrays.temperature,
            seed=seeds[place],
            quantiser=quantiser,
        )
        for place, end, length, finish, kv_peak in zip(
            arrays.places_B, ends_B, arrays.lengths_B, arrays.finishes_B, arrays.kv_peaks_B, strict=True
        )
    ]
    return GradedRollouts(arrays.places_B.tolist(), rollouts, [], arrays.graded, arrays.stats, arrays.grade_s)


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
