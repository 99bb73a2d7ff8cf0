"""Compute results from graded samples: scores, differences to the first cache, and mismatch metrics. Also convert to JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .benchmark import BenchmarkScore, by_problem, is_binary, score
from .mismatch import Criteria, Mismatch, summary
from .statistics import Estimate, paired_difference, t_interval
from .work import FinishedPart


@dataclass(frozen=True)
class Result:
    benchmark: str
    setting: str
    score: BenchmarkScore
    against: str | None
    """Name of the first setting, which `difference` refers to; None for the first setting itself."""
    difference: Estimate | None
    """Paired difference of mean rewards, per problem, to the first setting; None for the first setting itself."""
    mismatch: Mismatch | None


def results(
    benchmark: str,
    settings: Sequence[str],
    done: Sequence[FinishedPart],
    samples: int,
    ks: Iterable[int],
    criteria: Criteria,
) -> list[Result]:
    """Return the results of one benchmark for all settings. Differences are relative to the first setting."""
    found: list[Result] = []
    for setting, each in zip(settings, done, strict=True):
        first = not found
        found.append(
            Result(
                benchmark,
                setting,
                score(each.samples, each.cost, samples, ks),
                None if first else settings[0],
                None if first else difference(each, done[0], samples),
                mismatch_of(each, criteria) if each.log_xi else None,
            )
        )
    return found


def mismatch_of(done: FinishedPart, criteria: Criteria) -> Mismatch:
    """Return the mismatch over all finished samples."""
    return summary([np.load(path) for path in done.log_xi], done.samples, criteria.spec)


def difference(done: FinishedPart, first: FinishedPart, samples: int) -> Estimate:
    """Return the paired difference `done` - `first` of mean rewards, over the problems that have rewards in both."""
    ours, theirs = by_problem(done.samples), by_problem(first.samples)
    both = sorted(ours.keys() & theirs.keys())
    values, others = means(ours, both), means(theirs, both)
    if both and not (is_binary(ours) and is_binary(theirs)):
        return t_interval([value - other for value, other in zip(values, others, strict=True)])
    return paired_difference(values, others, samples)


def means(verdicts: dict[int, list[float]], problems: Sequence[int]) -> list[float]:
    return [math.fsum(verdicts[problem]) / len(verdicts[problem]) for problem in problems]


def as_json(result: Result) -> dict[str, Any]:
    """Return the result as a JSON-serializable dict. A non-finite value of a score or of the mismatch becomes null."""
    score = result.score
    values: dict[str, Any] = {"benchmark": result.benchmark, "setting": result.setting, "problems": score.problems}
    values |= {"samples_per_prompt": score.samples, "pass@1": _estimate(score.mean)}
    values["pass@k"] = {str(k): _estimate(each) for k, each in score.pass_at.items()}
    if result.difference is not None:
        values["difference"] = {"against": result.against, **_estimate(result.difference)}
    for name in ("mean_tokens", "truncated", "repetition", "kv_peak", "token_savings", "tokens_per_s"):
        values[name] = getattr(score, name)
    values |= asdict(score.cost)
    if result.mismatch is not None:
        measured = asdict(result.mismatch)
        del measured["figures"]  # its values are in other fields
        values["mismatch"] = {name: _number(value) for name, value in measured.items() if value is not None}
    return values


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {name: _number(value) for name, value in estimate._asdict().items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
