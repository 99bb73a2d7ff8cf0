"""The benchmarks of an evaluation: built-in tasks, files or hub datasets, with their sampling and reward."""

import argparse
import re
from dataclasses import dataclass

from ..config import TASKS, DataConfig, RewardConfig, Sampling
from ..data.examples import Example, load, name_of
from ..errors import UserError
from ..rewards.weighted_sum import refuse_without_answers

OWN_MAX_TOKENS = 4096
"""Default of --max-tokens for data that is not a built-in task."""
GENERATED_PROBLEMS = 256
"""Default of --problems for a task that generates problems."""


@dataclass(frozen=True)
class BenchmarkSource:
    """A benchmark named in --benchmarks, with its examples and settings, before tokenization."""

    name: str
    title: str
    path: str
    examples: list[Example]
    sampling: Sampling
    samples: int
    ks: tuple[int, ...]
    reward: str
    note: str | None
    """Sentence about the data that is shown to the user."""


def asked_sources(args: argparse.Namespace, data: DataConfig, reward: RewardConfig) -> list[BenchmarkSource]:
    """Return the benchmarks in --benchmarks. A task is evaluated as in its papers, unless flags say otherwise."""
    paths = [path.strip() for path in args.benchmarks.split(",")]
    names = [name_of(path) for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--benchmarks has two entries named {name}: list it once, or rename one of the files.")
    found = []
    for path, name in zip(paths, names, strict=True):
        task = TASKS.get(path)
        title, most, samples = (task.title, task.max_tokens, task.samples) if task else (name, OWN_MAX_TOKENS, 1)
        samples = args.samples_per_prompt or samples
        sampling = Sampling(max_tokens=args.max_tokens or most, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
        ks = asked_ks(args.pass_at, samples, name)
        loaded = load(path, "test", n=args.problems or GENERATED_PROBLEMS, seed=0, **data.reading)
        examples, function = loaded.examples[: args.problems], reward.function_for(path)
        refuse_without_answers(path, examples[0], function)
        found.append(BenchmarkSource(name, title, path, examples, sampling, samples, ks, function, loaded.note))
    return found


def asked_ks(text: str | None, samples: int, name: str) -> tuple[int, ...]:
    """Return the values k of pass@k. The default is `samples` and all powers of two below it."""
    if text is None:
        return tuple(sorted({*(2**power for power in range(samples.bit_length())), samples}))
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise UserError(f"--pass-at {text} is not a list of integers. Example: 1,8,32.")
    ks = sorted(set(map(int, text.split(","))))
    if ks[-1] > samples:
        raise UserError(
            f"pass@{ks[-1]} needs {ks[-1]} samples per problem, but {name} has {samples}: lower --pass-at or set "
            f"--samples-per-prompt {ks[-1]}."
        )
    return tuple(ks)
