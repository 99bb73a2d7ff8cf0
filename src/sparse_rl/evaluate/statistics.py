"""Unbiased pass@k and 95 % confidence intervals of scores. Pure functions on plain numbers, without torch.

Samples of one problem are correlated, so intervals treat problems, not samples, as independent.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
T = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}
"""The 97.5 % quantile of Student's t for 1 to 4 degrees of freedom, where the series in `quantile` is too inaccurate."""


class Estimate(NamedTuple):
    mean: float
    low: float
    high: float
    """Upper end of the 95 % confidence interval from `low` to `high`. NaN if there are too few values for an interval."""


NOTHING = Estimate(math.nan, math.nan, math.nan)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return pass@k: the probability that k of the `samples`, drawn without replacement, include a correct one.

    Chen et al. 2021, arXiv 2107.03374: 1 - C(n - c, k) / C(n, k). This is an unbiased estimate of the probability that k new
    samples include a correct one.
    """
    if not 0 <= right <= samples or k < 1:
        raise ValueError(
            f"right = {right}, samples = {samples}, k = {k} is invalid: 0 <= right <= samples and k >= 1 are required."
        )
    if k > samples:
        raise ValueError(f"pass@{k} needs {k} samples, but there are {samples}.")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def mean_interval(values: Sequence[float], samples: float = 1) -> Estimate:
    """Return the mean over problems and its interval. Each value is the mean of about `samples` samples of one problem.

    If all values are in [0, 1], use Wilson's interval with an effective number of trials n = p (1 - p) / se^2, where se is the
    standard error over problems. n is at least the number of problems and at most the number of all samples (Korn and Graubard
    1998; Franco et al. 2019). With one sample per problem, this is the ordinary Wilson interval. The interval stays in [0, 1]
    and has a positive width even if all answers are correct or all are wrong. For other values, use mean +- t standard errors.
    """
    problems = len(values)
    if problems == 0:
        return NOTHING
    if min(values) < 0 or max(values) > 1:
        return t_interval(values)
    mean = math.fsum(values) / problems
    if set(values) <= {0.0, 1.0}:
        return wilson(mean, problems, Z)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, problems - 1)
    effective = mean * (1 - mean) * problems / variance if variance else math.inf
    trials = min(max(effective, problems), problems * max(1.0, samples))
    return wilson(mean, trials, quantile(problems - 1) if problems > 1 else Z)


def t_interval(values: Sequence[float]) -> Estimate:
    """Return mean +- t standard errors. For a single value, the interval is NaN."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, math.nan, math.nan)
    half = quantile(n - 1) * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Estimate(mean, mean - half, mean + half)


def wilson(mean: float, trials: float, z: float) -> Estimate:
    """Return Wilson's interval (1927): all p that a z-test does not reject given the observed share `mean`."""
    middle = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    return Estimate(mean, min(mean, max(0.0, middle - half)), max(mean, min(1.0, middle + half)))


def paired_difference(values: Sequence[float], others: Sequence[float], samples: float = 1) -> Estimate:
    """Return the paired difference `values` - `others` over problems, with its interval.

    If all values are in [0, 1], add two artificial problems with differences of +1 / sqrt(samples) and -1 / sqrt(samples).
    With one sample per problem, this is the interval of Bonett and Price 2012, which keeps its coverage when few or no
    problems differ. For other values, use mean +- t standard errors.
    """
    gaps = [value - other for value, other in zip(values, others, strict=True)]
    problems = len(gaps)
    if problems == 0:
        return NOTHING
    mean = math.fsum(gaps) / problems
    if min(*values, *others) < 0 or max(*values, *others) > 1:
        return t_interval(gaps)
    extra = 1 / math.sqrt(max(1.0, samples))
    padded = [*gaps, extra, -extra]
    middle = math.fsum(padded) / len(padded)
    variance = math.fsum((gap - middle) ** 2 for gap in padded) / len(padded)
    half = quantile(problems + 1) * math.sqrt(variance / len(padded))
    return Estimate(mean, max(-1.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)))


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Return the unweighted mean of independent scores, with its interval.

    The distances from the means to the interval ends are combined like standard errors (Zou and Donner 2008).
    """
    n = len(estimates)
    mean = math.fsum(each.mean for each in estimates) / n
    below = math.sqrt(math.fsum((each.mean - each.low) ** 2 for each in estimates)) / n
    above = math.sqrt(math.fsum((each.high - each.mean) ** 2 for each in estimates)) / n
    return Estimate(mean, mean - below, mean + above)


def quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t by the Cornish-Fisher expansion in 1 / degrees, accurate to three digits."""
    if degrees in T:
        return T[degrees]
    z, n = Z, degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
