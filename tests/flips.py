"""Compare what a quantised sampler stores with what its replay stores: which codes flip, and how close log-probs are."""

# R rollouts, T tokens of a sequence but the last, N codes and steps of a token, t response tokens

from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from sparse_rl import Engine, Sampling, replay
from sparse_rl.kv.storage import Quantiser


class Compared(NamedTuple):
    rollouts: list
    differs_RTN: Tensor
    """Codes and steps that differ between sampler and replay."""
    exact_Rt: Tensor
    """Response tokens that no flipped code has reached."""
    gaps_Rt: Tensor
    """Distance of the log-probs of sampler and sparse replay."""
    dense_gaps_Rt: Tensor

    @property
    def first_flips(self) -> float:
        """Share of codes and steps that flip first. A flip changes the hidden states of all later tokens a little and makes theirs
        likelier, so only tokens up to the first flipped one of a sequence count."""
        flipped_RT = self.differs_RTN.any(dim=2)
        reached_RT = flipped_RT.cumsum(dim=1)
        return float(self.differs_RTN[(reached_RT == 0) | ((reached_RT == 1) & flipped_RT)].float().mean())

    @property
    def exact_max(self) -> float:
        return float(self.gaps_Rt[self.exact_Rt].max())


def sampled_and_replayed(engine: Engine, prompts: list[list[int]], tokens: int) -> Compared:
    """Sample `tokens` tokens for each prompt and replay them. The prompts have one length, and each has a slot."""
    assert len({len(prompt) for prompt in prompts}) == 1 and engine.slots == len(prompts)
    with recorded_codes() as sampler:
        rollouts = engine.generate(prompts, sampling=Sampling(max_tokens=tokens, stop=()))
    with recorded_codes() as learner, torch.no_grad():
        replayed = torch.stack(replay(engine.model, rollouts, "sparse", tokens_per_pass=1))
    with torch.no_grad():
        dense = torch.stack(replay(engine.model, rollouts, "dense"))
    assert sorted(sampler) == sorted(learner) == list(range(len(engine.limits.shape.full_layers)))
    parts = []
    for layer, calls in sampler.items():
        prefilled = calls[0][0].unflatten(0, (len(prompts), -1))  # a compressed prompt is encoded again, in a later call
        steps = [call for call in calls if call.shape[1] == 1]
        parts.append(torch.cat([prefilled, *steps], dim=1) != torch.cat(learner[layer]))
    differs_RTN = torch.cat(parts, dim=2)
    flipped_RT = differs_RTN.any(dim=2).cumsum(dim=1) > 0
    logprobs = torch.stack([rollout.logprobs for rollout in rollouts])
    exact_Rt = ~flipped_RT[:, len(prompts[0]) - 1 :]
    return Compared(rollouts, differs_RTN, exact_Rt, (replayed - logprobs).abs(), (dense - logprobs).abs())


@contextmanager
def recorded_codes():
    """Yield the codes and steps [rows, tokens, numbers] of all calls of `Quantiser.encode` by layer."""
    found: dict[int, list[Tensor]] = {}
    encode = Quantiser.encode

    def recorded(quantiser, layer, keys, values):
        stored = encode(quantiser, layer, keys, values)
        found.setdefault(layer, []).append(torch.cat([each.transpose(1, 2).flatten(2).float() for each in stored], dim=2))
        return stored

    with patch.object(Quantiser, "encode", recorded):
        yield found
