"""Pass@1 on held-out problems: one rollout of each, graded, with a 95 % interval."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..data.examples import Example
from ..rewards.pool import RewardPool
from ..rollout.engine import Engine
from ..rollout.settings import Sampling
from ..rollout.stats import Progress


@dataclass(frozen=True)
class Accuracy:
    mean: float
    """Of the rewards; for rewards of 0 and 1 the share that is right."""
    low: float
    high: float
    """95 % interval of the mean: Wilson's where rewards are 0 and 1, else by their standard error."""
    problems: int
    """With a verdict."""
    no_verdict: int
    """Without one, for whatever reason: they are not in the mean."""
    mean_tokens: float
    truncated: float
    token_savings: float


def accuracy(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    prompts: Sequence[list[int]],
    pool: RewardPool,
    sampling: Sampling,
    progress: Callable[[Progress], None] | None = None,
) -> Accuracy:
    rollouts = engine.generate(prompts, sampling=sampling, record=False, progress=progress)
    texts = tokenizer.batch_decode([rollout.response for rollout in rollouts], skip_special_tokens=True)
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    graded = pool.grade([example.prompt for example in examples], texts, columns)
    values = [value for value in graded.values if value is not None]
    mean, low, high = mean_interval(values)
    return Accuracy(
        mean,
        low,
        high,
        len(values),
        len(graded.values) - len(values),
        engine.stats.tokens / len(rollouts),
        sum(rollout.finish != "stop" for rollout in rollouts) / len(rollouts),
        engine.stats.token_savings,
    )


def mean_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """(mean, low, high), NaN without values."""
    n = len(values)
    if n == 0:
        return math.nan, math.nan, math.nan
    mean = sum(values) / n
    if set(values) <= {0.0, 1.0}:
        middle = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return mean, middle - half, middle + half
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, n - 1))
    return mean, mean - z * spread / math.sqrt(n), mean + z * spread / math.sqrt(n)
