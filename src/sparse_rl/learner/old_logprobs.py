"""Compute log pi_old: log-probs of sampled responses under the weights at rollout time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.compile import fused_layers
from ..models.sharded import release_weights, with_weights
from ..rollout.rollout import Rollout
from ..world import ALONE, World
from .replay import ReplayKind, logprobs_of, passes_of


@torch.no_grad()
def old_logprobs(
    model: PreTrainedModel, rollouts: Sequence[Rollout], view: ReplayKind, tokens_per_pass: int, world: World = ALONE
) -> tuple[list[Tensor], list[float]]:
    """Return (log-probs of the response tokens, sum of their entropy) of each rollout under the current weights. Ranks share
    the work."""
    if not rollouts:
        return [], []
    logprobs: dict[int, Tensor] = {}
    entropies: dict[int, Tensor] = {}
    for indices in passes_of(model, rollouts, view, tokens_per_pass, world):
        pack = [rollouts[index] for index in indices or [0]]  # ranks run every pass together: without rows, run any rollout
        with fused_layers(model):
            logprobs_n, entropy_n = with_weights(model, logprobs_of, pack, view)
        if indices:
            lengths = [len(rollout.response) for rollout in pack]
            logprobs |= zip(indices, logprobs_n.split(lengths), strict=True)
            entropies |= zip(indices, (each.sum() for each in entropy_n.split(lengths)), strict=True)
    release_weights(model)
    if world.size > 1:
        parts = world.gather({row: (each.cpu(), entropies[row].cpu()) for row, each in logprobs.items()})
        found = {row: pair for part in parts for row, pair in part.items()}
        logprobs = {row: pair[0].to(model.device) for row, pair in found.items()}
        entropies = {row: pair[1] for row, pair in found.items()}
    rows = range(len(rollouts))
    return [logprobs[row] for row in rows], torch.stack([entropies[row] for row in rows]).tolist()
