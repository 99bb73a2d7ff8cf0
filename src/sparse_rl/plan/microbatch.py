"""The largest micro-batch of a run: the responses and prompts that a learner pass computes."""

from dataclasses import dataclass

from ..config import SHADOW_METHODS, Config
from ..sizes import worth_sharing


def rollouts_of_rank(config: Config) -> int:
    return -(-config.rollout.rollouts_per_step // config.ranks.count)


@dataclass(frozen=True)
class LargestPack:
    """Rollouts of the largest micro-batch."""

    lengths: list[int]
    """Response tokens of each rollout."""
    prompts: int
    """Prompts that are computed. Samples of one group share theirs."""
    prompt_tokens: int

    @property
    def responses(self) -> int:
        return sum(self.lengths)

    @property
    def tokens(self) -> int:
        return self.responses + self.prompts * self.prompt_tokens


def shares_prompts(config: Config, *, plain: bool) -> bool:
    """Return whether the plan assumes that short responses share their prompt in the learner. A model that is not `plain` needs
    whole sequences."""
    alone = config.ranks.count == 1 and config.rollout.samples_per_prompt > 1
    return alone and plain and config.method not in SHADOW_METHODS


def samples_per_computed_prompt(prompt_tokens: int, config: Config, *, plain: bool) -> int:
    """Return how many rollouts of full length share their prompt in the learner.

    A shadow pass shares no prompts. Neither do several ranks, by assumption, because they balance their passes by length.
    """
    worth = worth_sharing(prompt_tokens, config.rollout.max_tokens)
    return config.rollout.samples_per_prompt if shares_prompts(config, plain=plain) and worth else 1


def largest_pack(prompt_tokens: int, config: Config, *, plain: bool) -> LargestPack:
    """Return the largest micro-batch: as many responses of `max_tokens` as fit, plus one that fills the rest."""
    longest, room = config.rollout.max_tokens, config.optimizer.tokens_per_microbatch
    group = samples_per_computed_prompt(prompt_tokens, config, plain=plain)
    lengths, room = [longest], room - longest - prompt_tokens
    while len(lengths) < rollouts_of_rank(config):
        room -= 0 if len(lengths) % group else prompt_tokens
        if room < 1:
            break
        lengths.append(min(longest, room))
        room -= lengths[-1]
    return LargestPack(lengths, -(-len(lengths) // group), prompt_tokens)
