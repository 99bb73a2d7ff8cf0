"""Sample and grade groups of rollouts, and compute the advantage of each rollout within its group."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import MAX_DRAWS, Config, RewardConfig
from ..data.examples import Example
from ..format import counted
from ..kernels.counter_rng import derive
from ..learner.advantages import group_advantages, overlong_penalty
from ..learner.losses import get as get_loss
from ..rewards.pool import RewardPool
from ..rollout.engine import Engine
from ..rollout.exchange import from_arrays, to_arrays
from ..rollout.graded import sample_and_grade
from ..rollout.rollout import Rollout
from ..rollout.stats import Progress, Stats
from ..sizes import recorded_rollouts
from ..world import ALONE, World

FAILURES = ("no_verdict", "timeouts", "errors")
"""Reasons why the reward did not grade a rollout. `reward/<name>` is the metric of each reason."""
COUNTED = (*FAILURES, "truncated", "strays")
REPLACED = 2**40
"""Counter that derives the seed of a replacement from the rollout's seed. It exceeds the token positions, which are the
counters of sampling."""
KNOWN_LENGTHS = 2**14
"""Maximum number of problems whose mean response length is stored. state.json holds them and is limited to 1 MiB."""


@dataclass
class Sample:
    """A rollout with its problem, reward and advantage."""

    row: int
    """Index of the rollout among all rollouts of the step."""
    example: Example
    rollout: Rollout
    reward: float | None
    advantage: float = 0.0
    in_loss: bool = False
    """True if the rollout has a reward, its group has at least two rewards, and the rollout is not masked."""


@dataclass
class RolloutGroup:
    """The samples of one prompt."""

    samples: list[Sample]
    equal_rewards: bool = False
    """True if the group has at least two rewards and all of them are equal."""

    @property
    def has_signal(self) -> bool:
        """True if the rewards of the group differ and at least one rollout is in the loss."""
        return not self.equal_rewards and any(sample.in_loss for sample in self.samples)

    @property
    def is_dropped(self) -> bool:
        """True if fewer than two rollouts have a verdict, so that none is in the loss."""
        return sum(sample.reward is not None for sample in self.samples) < 2


@dataclass
class RolloutBatch:
    """The rollouts of a step, in groups, with their rewards and costs."""

    groups: list[RolloutGroup] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    """Counts by the names in `COUNTED`.

    `FAILURES` count rollouts that the reward did not grade, `truncated` counts rollouts not sent to the reward, and `strays`
    counts lines that reward code wrote to its worker's channel.
    """
    first_error: str | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Values of each function of a summed reward."""
    recorded: list[int] = field(default_factory=list)
    """Rows whose evictions were recorded."""
    replaced: list[Sample] = field(default_factory=list)
    """Rejected rollouts that were replaced by another sample. They belong to no group."""
    old_logprobs: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    """Old log-probs and summed entropy of each row that was checked for rejection, by row."""
    old_logprobs_s: float = 0.0
    """Seconds spent on `old_logprobs`."""
    prompts: int = 0
    """Prompts sampled, by which the step advances the data cursor."""
    grade_s: float = 0.0
    """Seconds of grading on the slowest rank, summed over the rounds."""
    waited_s: float = 0.0
    """Mean seconds that the ranks waited for the slowest rank."""
    sampled_s: float = 0.0
    """Seconds of sampling and grading on the slowest rank."""

    def share_traces(self, world: World) -> None:
        """Gather the recorded eviction traces from the ranks that sampled them, and set them on every rank.

        Without this call, a trace exists only on the rank that sampled its rollout.
        """
        if world.size == 1:
            return
        samples = self.samples
        mine = {row: trace for row in self.recorded if (trace := samples[row].rollout.trace) is not None}
        for theirs in world.gather(mine):
            for row, trace in theirs.items():
                samples[row].rollout = replace(samples[row].rollout, trace=trace)

    @property
    def samples(self) -> list[Sample]:
        """All sampled rollouts by row, including replaced ones."""
        grouped = [sample for group in self.groups for sample in group.samples]
        return sorted([*grouped, *self.replaced], key=lambda sample: sample.row) if self.replaced else grouped

    @property
    def grading_failure(self) -> str | None:
        """Reason why the reward graded no rollout; None if it graded at least one or received none."""
        asked = len(self.samples) - self.counts["truncated"]
        if not asked or self.failures < asked:
            return None
        why = f": {self.first_error}" if self.first_error else " (None or timeout)"
        return f"The reward gave no verdict for any of {asked} rollouts{why}"

    def remarks(self, reward: RewardConfig) -> list[str]:
        """Return warnings about failed rewards in this step."""
        sentences = []
        if failures := self.counts["errors"] + self.counts["timeouts"]:
            sentences.append(
                f"the reward failed on {counted(failures, 'rollout')} (see reward.log): {self.first_error or 'timeout'}"
            )
        if strays := self.counts["strays"]:
            sentences.append(f"ignored {counted(strays, 'line')} that a reward wrote to the channel of its worker process")
        zeros = {"truncated": reward.truncated == "zero", "timeout": reward.timeout == "zero"}
        counts = {"truncated": self.counts["truncated"], "timeout": self.counts["timeouts"]}
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        for key in [key for key, is_zero in zeros.items() if is_zero and counts[key] and min(rewards) < 0]:
            sentences.append(
                f"reward.{key} = zero gave {counted(counts[key], 'rollout')} the reward 0, more than the lowest reward "
                f"{min(rewards):.3g}: set it to none, or return no reward below 0"
            )
        return sentences

    @property
    def failures(self) -> int:
        """Number of rollouts that were sent to the reward but not graded."""
        return sum(self.counts[name] for name in FAILURES)


ProgressCallback = Callable[[Progress], None]
FindRejected = Callable[[RolloutBatch, Sequence[int]], Sequence[int]]


class RolloutSampler:
    """Samples groups of responses to the next prompts of the data and grades them. The same cursor gives the same groups."""

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
        world: World = ALONE,
    ):
        """Set up the sampler. Benchmarks pass `limits`, a function from rollout seeds to response lengths in tokens."""
        self.limits, self.world = limits, world
        self.mean_tokens: dict[str, float] = {}
        """Mean response tokens of each problem the last time it was sampled, by problem index, most recent last.

        Checkpoints store it.
        """
        self.config, self.examples, self.prompts, self.order = config, examples, prompts, order
        self.engine, self.tokenizer, self.pool = engine, tokenizer, pool

    def draw(self, cursor: int, progress: ProgressCallback | None, find_rejected: FindRejected | None = None) -> RolloutBatch:
        """Sample the groups of the step that starts at `cursor` of the data. With `rollout.refill`, sample until enough groups
        have a signal.

        `find_rejected` returns the rows of a batch that the correction rejects. Each of them is replaced by another sample of
        its prompt, in up to `MAX_DRAWS` rounds, the first one included.
        """
        batch = RolloutBatch()
        wanted = self.config.rollout.prompts_per_step
        for _ in range(MAX_DRAWS if self.config.refill else 1):
            missing = wanted - sum(group.has_signal for group in batch.groups)
            first = len(batch.groups)
            self._sample(batch, cursor + batch.prompts, missing if batch.prompts else wanted, progress)
            if find_rejected is not None:
                self._replace_rejected(batch, range(first, len(batch.groups)), find_rejected, progress)
            if sum(group.has_signal for group in batch.groups) >= wanted:
                break
        return batch

    def learnable(self, batch: RolloutBatch) -> list[RolloutGroup]:
        """Return the groups that the update uses."""
        if self.config.refill or self.config.advantage.drop_zero_signal:
            return [group for group in batch.groups if group.has_signal][: self.config.rollout.prompts_per_step]
        return batch.groups

    def _sample(self, batch: RolloutBatch, cursor: int, count: int, progress: ProgressCallback | None) -> None:
        """Sample and grade groups of the next `count` prompts, and add them to the batch."""
        config, per_prompt = self.config, self.config.rollout.samples_per_prompt
        chosen = self.order(cursor, count)
        seeds = [derive(config.seed, cursor + place, sample) for place in range(count) for sample in range(per_prompt)]
        examples, prompts = [self.examples[index] for index in chosen], [self.prompts[index] for index in chosen]
        record = recorded_rollouts(config, len(seeds)) if self.engine.is_sparse else range(0)
        first = len(batch.samples)
        batch.recorded += [first + place for place in record]
        expected = self._expected_tokens(chosen)
        samples = self._sample_round(batch, examples, prompts, per_prompt, seeds, expected, record, progress)
        batch.groups += self._with_advantages(samples)
        batch.prompts += count
        for place, index in enumerate(chosen):
            self._note_length(index, samples[place * per_prompt : (place + 1) * per_prompt])

    def _replace_rejected(
        self, batch: RolloutBatch, groups: Iterable[int], find_rejected: FindRejected, progress: ProgressCallback | None
    ) -> None:
        """Replace rejected rollouts of these groups. Rollouts that the last round rejects remain."""
        rows = [sample.row for number in groups for sample in batch.groups[number].samples]
        for _ in range(MAX_DRAWS - 1):
            rejected = set(find_rejected(batch, rows))
            if not rejected:
                return
            places = [
                (number, place)
                for number in groups
                for place, sample in enumerate(batch.groups[number].samples)
                if sample.row in rejected
            ]
            before = [batch.groups[number].samples[place] for number, place in places]
            samples = self._sample_round(
                batch,
                [sample.example for sample in before],
                [sample.rollout.prompt for sample in before],
                1,
                [derive(sample.rollout.seed, REPLACED) for sample in before],
                [float(len(sample.rollout.response)) for sample in before],
                (),
                progress,
            )
            for (number, place), sample in zip(places, samples, strict=True):
                batch.groups[number].samples[place] = sample
            for sample in before:
                sample.advantage, sample.in_loss = 0.0, False
            batch.replaced += before
            for number in sorted({number for number, _ in places}):
                (batch.groups[number],) = self._with_advantages(batch.groups[number].samples)
            rows = [sample.row for sample in samples]

    def _sample_round(
        self,
        batch: RolloutBatch,
        examples: list[Example],
        prompts: list[list[int]],
        per_prompt: int,
        seeds: list[int],
        expected: list[float],
        record: Collection[int],
        progress: ProgressCallback | None,
    ) -> list[Sample]:
        """Sample and grade on all ranks, and add the costs to the batch. `expected` are response lengths by prompt."""
        part = sample_and_grade(
            self.engine,
            self.tokenizer,
            self.pool,
            examples,
            prompts,
            per_prompt,
            self.config.rollout.sampling(self.config.seed),
            seeds=seeds,
            limits=None if self.limits is None else self.limits(seeds),
            record=record,
            routing=self.config.model.routing_replay,
            take=self._work_queue(expected, prompts, per_prompt),
            progress=progress if progress is None or self.world.size > 1 else _with_total(progress, len(seeds)),
        )
        parts = [part]
        if self.world.size > 1:
            received = enumerate(self.world.gather(to_arrays(part)))
            known = (prompts, per_prompt, seeds, self.engine.rollout_quantiser)
            parts = [part if rank == self.world.rank else from_arrays(each, *known) for rank, each in received]
        first = len(batch.samples)
        samples: list[Sample] = [None] * len(seeds)  # type: ignore[list-item]
        for each in parts:
            for place, rollout, reward in zip(each.places, each.rollouts, each.graded.values, strict=True):
                samples[place] = Sample(first + place, examples[place // per_prompt], rollout, reward)
            batch.counts.update({name: getattr(each.graded, name) for name in COUNTED})
            batch.first_error = batch.first_error or each.graded.first_error
            for name, values in each.graded.parts.items():
                batch.parts.setdefault(name, []).extend(value for value in values if value is not None)
        batch.stats.append(functools.reduce(Stats.merged_with, (each.stats for each in parts)))
        batch.grade_s += max(each.grade_s for each in parts)
        took = [each.stats.seconds + each.grade_s for each in parts]
        batch.sampled_s += max(took)
        batch.waited_s += max(took) - sum(took) / len(took)
        return samples

    def _expected_tokens(self, chosen: list[int]) -> list[float]:
        """Return the mean response length of each problem when it was last sampled. For a new problem, return the mean of all
        known ones."""
        known = self.mean_tokens
        typical = sum(known.values()) / len(known) if known else 0.0
        return [known.get(str(index), typical) for index in chosen]

    def _note_length(self, index: int, group: list[Sample]) -> None:
        self.mean_tokens.pop(str(index), None)
        self.mean_tokens[str(index)] = sum(len(sample.rollout.response) for sample in group) / len(group)
        if len(self.mean_tokens) > KNOWN_LENGTHS:
            del self.mean_tokens[next(iter(self.mean_tokens))]

    def _work_queue(
        self, expected: Sequence[float], prompts: Sequence[list[int]], per_prompt: int
    ) -> Callable[[], int | None] | None:
        """Return a function that returns the next prompt for this rank, or None if all rollouts start at once on one rank.

        Prompts with the longest expected responses come first, so that few slots are idle at the end.
        """
        if self.world.size == 1 and self.engine.slots >= len(prompts) * per_prompt:
            return None
        costs = [tokens + 1e-3 * len(prompt) for tokens, prompt in zip(expected, prompts, strict=True)]
        if self.world.size == 1:
            waiting = iter(sorted(range(len(prompts)), key=lambda place: -costs[place]))
            return lambda: next(waiting, None)
        room = max(1, self.engine.slots // per_prompt)
        return self.world.work_queue(costs, min(room, -(-len(prompts) // self.world.size)))

    def _with_advantages(self, samples: list[Sample]) -> list[RolloutGroup]:
        config = self.config
        verdicts = torch.tensor(
            [math.nan if sample.reward is None else sample.reward for sample in samples], dtype=torch.float64
        )
        rewards = verdicts
        if config.advantage.overlong:
            lengths = torch.tensor([len(sample.rollout.response) for sample in samples])
            rewards = rewards + overlong_penalty(lengths, config.rollout.max_tokens, config.advantage.overlong)
        per_prompt = config.rollout.samples_per_prompt
        std = config.advantage.std and get_loss(config.loss.name).std
        valued = group_advantages(rewards.view(-1, per_prompt), std)
        equal = group_advantages(verdicts.view(-1, per_prompt)).equal_rewards  # without the length penalty
        groups = []
        for number in range(len(samples) // per_prompt):
            group = RolloutGroup(samples[number * per_prompt : (number + 1) * per_prompt], bool(equal[number]))
            for sample, advantage, in_loss in zip(
                group.samples, valued.advantages[number].tolist(), valued.in_loss[number].tolist(), strict=True
            ):
                masked = config.advantage.mask_truncated and sample.rollout.finish == "length"
                sample.advantage, sample.in_loss = advantage, in_loss and not masked
            groups.append(group)
        return groups


def _with_total(progress: Callable[[Progress], None], total: int) -> Callable[[Progress], None]:
    """Return a callback that reports the progress out of `total` rollouts, including those that have not started."""
    return lambda state: progress(replace(state, total=total))
