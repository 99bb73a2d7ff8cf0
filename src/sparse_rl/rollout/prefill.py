"""Prompts go in: packed into one row of tokens, each attending to itself alone, compressed layer by layer as they pass.

Only one layer's keys of the packed prompts exist at a time beside the cache: that is the scratch.
"""

# N tokens of all prompts, Q query heads, H kv heads, T tokens of one prompt, D head dimension

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.attention import causal_attention
from ..kv.cache import SlotCache
from ..kv.policies import Policy
from ..kv.settings import KV
from ..models.attention import run


@dataclass
class PromptInSlots:
    """One prompt on its way into the slots of its samples."""

    prompt: list[int]
    slots: list[int]
    seeds: list[int]
    dropped: list[Tensor] = field(default_factory=list)
    """Positions dropped in each layer, [B, H, N]; B is 1 where all samples drop the same."""

    def dropped_of(self, sample: int) -> Tensor | None:
        """[L, H, N] of one sample, None where the prompt fitted the budget."""
        if not self.dropped:
            return None
        return torch.stack([dropped[min(sample, dropped.shape[0] - 1)] for dropped in self.dropped])


def prefill(
    model: PreTrainedModel, cache: SlotCache, policy: Policy, kv: KV, prompts: list[PromptInSlots]
) -> Tensor:
    """Fill the slots and return the logits [prompts, V] of the first response tokens."""
    device = cache.shape.device
    tokens = [token for each in prompts for token in each.prompt]
    positions = [position for each in prompts for position in range(len(each.prompt))]
    ends = torch.tensor([len(each.prompt) for each in prompts], device=device).cumsum(0)
    return run(
        model,
        torch.tensor([tokens], device=device),
        torch.tensor([positions], device=device),
        PrefillView(cache, policy, kv, prompts),
        keep=ends - 1,
    )[0]


class PrefillView:
    def __init__(self, cache: SlotCache, policy: Policy, kv: KV, prompts: list[PromptInSlots]):
        self.cache, self.policy, self.kv, self.prompts = cache, policy, kv, prompts

    def attend(self, layer, queries_1QND, keys_1HND, values_1HND, scale, positions_1N):
        outputs, start = [], 0
        for prompt in self.prompts:
            stop = start + len(prompt.prompt)
            q, k, v = (tensor[:, :, start:stop] for tensor in (queries_1QND, keys_1HND, values_1HND))
            outputs.append(causal_attention(q, k, v, scale=scale))
            dropped = self.cache.fill(layer, prompt.slots, q, k, v, self.kv.budget, self.policy, seeds=prompt.seeds)
            if dropped is not None:
                prompt.dropped.append(dropped)
            start = stop
        return torch.cat(outputs, dim=2)
