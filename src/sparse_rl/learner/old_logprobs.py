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
) -> tuple[list[Tensor], float]:
    """Return (log-probs of every response token, mean entropy) under the current weights. Ranks share the work."""
    rows: dict[int, Tensor] = {}
    entropy = 0.0
    for indices in passes_of(rollouts, tokens_per_pass, world):
        pack = [rollouts[index] for index in indices or [0]]  # a pass without rows keeps step with other ranks
        with fused_layers(model):
            logprobs_n, entropy_n = with_weights(model, logprobs_of, pack, view)
        if indices:
            rows |= zip(indices, logprobs_n.split([len(rollout.response) for rollout in pack]), strict=True)
            entropy += float(entropy_n.sum())
    release_weights(model)
    if world.size > 1:
        parts = world.gather(({row: logprobs.cpu() for row, logprobs in rows.items()}, entropy))
        rows = {row: logprobs.to(model.device) for part, _ in parts for row, logprobs in part.items()}
        entropy = sum(part for _, part in parts)
    return [rows[row] for row in range(len(rollouts))], entropy / sum(len(rollout.response) for rollout in rollouts)
