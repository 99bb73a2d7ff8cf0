"""Groups: the rollouts of a prompt, what they earned, and what each is worth against the others."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from ..data.examples import Example
from ..kernels.counter_rng import derive
from ..learner.advantages import group_advantages, overlong_penalty
from ..rewards.pool import RewardPool
from ..rollout.engine import Engine
from ..rollout.rollout import Rollout
from ..rollout.stats import Progress, Stats
from .settings import Config

MAX_DRAWS = 4
"""Rounds of prompts a step of dapo may sample until it has enough groups with a signal."""


@dataclass
class Sample:
    example: Example
    rollout: Rollout
    text: str
    reward: float | None
    advantage: float = 0.0
    takes_part: bool = False
    """Whether it has a verdict, in a group that has two."""


@dataclass
class Group:
    samples: list[Sample]
    no_signal: bool = False
    """All rewards equal."""

    @property
    def teaches(self) -> bool:
        """Whether two of its verdicts differ."""
        return not self.no_signal and any(sample.takes_part for sample in self.samples)


@dataclass
class Drawn:
    """Everything a step sampled, and what it learns from."""

    groups: list[Group] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    """no_verdict, timeouts, errors of the reward."""
    first_error: str | None = None
    prompts: int = 0
    grade_s: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def silent(self) -> str | None:
        """Why there is no verdict at all, if there is none."""
        if any(sample.reward is not None for sample in self.samples):
            return None
        why = f": {self.first_error}" if self.first_error else " (None or over time)"
        return f"The reward gave no verdict for any of {len(self.samples)} rollouts{why}"


class Dealer:
    """Draws prompts in the order of the data, samples them and has them graded. The same cursor gives the same groups."""

    def __init__(
        self,
        config: Config,
        examples: list[Example],
        prompts: list[list[int]],
        order: Callable[[int, int], list[int]],
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        pool: RewardPool,
        limits: Callable[[list[int]], list[int]] | None = None,
    ):
        """`limits` gives each rollout, by its seed, a number of tokens to end at: benchmarks draw lengths with it."""
        self.limits = limits
        self.config, self.examples, self.prompts, self.order = config, examples, prompts, order
        self.engine, self.tokenizer, self.pool = engine, tokenizer, pool

    def draw(self, cursor: int, progress: Callable[[Progress], None] | None) -> Drawn:
        """The groups of a step that starts at `cursor` of the data; for dapo until enough of them have a signal."""
        drawn = Drawn()
        wanted = self.config.rollout.prompts_per_step
        for _ in range(MAX_DRAWS if self.config.loss.name == "dapo" else 1):
            missing = wanted - sum(group.teaches for group in drawn.groups)
            self._sample(drawn, cursor + drawn.prompts, missing if drawn.prompts else wanted, progress)
            if sum(group.teaches for group in drawn.groups) >= wanted:
                break
        return drawn

    def learnable(self, drawn: Drawn) -> list[Group]:
        """The groups that are learned from."""
        if self.config.loss.name == "dapo" or self.config.advantage.drop_zero_signal:
            return [group for group in drawn.groups if group.teaches][: self.config.rollout.prompts_per_step]
        return drawn.groups

    def _sample(self, drawn: Drawn, cursor: int, count: int, progress) -> None:
        config, per_prompt = self.config, self.config.rollout.samples_per_prompt
        chosen = self.order(cursor, count)
        seeds = [derive(config.seed, cursor + place, sample) for place in range(count) for sample in range(per_prompt)]
        rollouts = self.engine.generate(
            [self.prompts[index] for index in chosen],
            per_prompt,
            config.rollout.sampling(config.seed),
            seeds=seeds,
            limits=None if self.limits is None else self.limits(seeds),
            record=self.engine.policy.evicts,
            progress=progress,
        )
        started = time.perf_counter()
        texts = self.tokenizer.batch_decode([rollout.response for rollout in rollouts], skip_special_tokens=True)
        examples = [self.examples[index] for index in chosen for _ in range(per_prompt)]
        columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
        graded = self.pool.grade([example.prompt for example in examples], texts, columns)
        samples = [
            Sample(example, rollout, text, reward)
            for example, rollout, text, reward in zip(examples, rollouts, texts, graded.values, strict=True)
        ]
        drawn.groups += self._valued(samples)
        drawn.stats.append(self.engine.stats)
        drawn.grade_s += time.perf_counter() - started
        drawn.counts.update(no_verdict=graded.no_verdict, timeouts=graded.timeouts, errors=graded.errors)
        drawn.first_error = drawn.first_error or graded.first_error
        drawn.prompts += count

    def _valued(self, samples: list[Sample]) -> list[Group]:
        config = self.config
        verdicts = torch.tensor(
            [math.nan if sample.reward is None else sample.reward for sample in samples], dtype=torch.float64
        )
        rewards = verdicts
        if config.advantage.overlong:
            lengths = torch.tensor([len(sample.rollout.response) for sample in samples])
            rewards = rewards + overlong_penalty(lengths, config.rollout.max_tokens, config.advantage.overlong)
        per_prompt = config.rollout.samples_per_prompt
        std = config.advantage.std and config.loss.policy.std
        valued = group_advantages(rewards.view(-1, per_prompt), std)
        no_signal = group_advantages(verdicts.view(-1, per_prompt)).no_signal  # a penalty on length alone is none
        groups = []
        for number in range(len(samples) // per_prompt):
            group = Group(samples[number * per_prompt : (number + 1) * per_prompt], bool(no_signal[number]))
            for sample, advantage, takes_part in zip(
                group.samples, valued.advantages[number].tolist(), valued.takes_part[number].tolist(), strict=True
            ):
                sample.advantage, sample.takes_part = advantage, takes_part
            groups.append(group)
        return groups
