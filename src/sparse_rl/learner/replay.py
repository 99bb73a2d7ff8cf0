"""Replay: the log-probs of rollouts in one parallel pass, as a dense model sees them or as the sampler did."""

# N packed tokens, Q query heads, H kv heads, L layers, T tokens of one rollout, V vocabulary

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError
from ..kernels.attention import causal_attention, shadow_attention
from ..kv.trace import NEVER
from ..models.attention import prepare, run
from ..rollout.rollout import Rollout


def replay(
    model: PreTrainedModel,
    rollouts: list[Rollout],
    view: Literal["sparse", "dense"],
    temperature: float | None = None,
    *,
    tokens_per_pass: int = 4096,
) -> list[Tensor]:
    """Float32 log-probs of each rollout's response tokens, differentiable.

    `sparse` rebuilds what the sampler saw from `evicted_at`; `dense` sees every key. `temperature` is the rollouts' own
    unless given (0 is greedy: log-probs at 1). Rollouts are packed without padding, `tokens_per_pass` of them at a time (at least one rollout).
    """
    if view not in ("sparse", "dense"):
        raise UserError(f"view = {view!r} is unknown: it is 'sparse' or 'dense'.")
    if view == "sparse" and any(rollout.trace is None for rollout in rollouts):
        raise UserError("A rollout has no recorded evictions to replay: generate with record=True.")
    if temperature is not None and temperature < 0:
        raise UserError(f"temperature = {temperature} must not be negative.")
    prepare(model)
    return [
        logprobs for pack in _packs(rollouts, tokens_per_pass) for logprobs in _replay_pack(model, pack, view, temperature)
    ]


def _packs(rollouts: list[Rollout], tokens_per_pass: int) -> Iterator[list[Rollout]]:
    pack: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        length = len(rollout.prompt) + len(rollout.response)
        if pack and tokens + length > tokens_per_pass:
            yield pack
            pack, tokens = [], 0
        pack.append(rollout)
        tokens += length
    if pack:
        yield pack


def _replay_pack(model: PreTrainedModel, pack: list[Rollout], view: str, temperature: float | None) -> list[Tensor]:
    device = model.device
    tokens: list[int] = []
    positions: list[int] = []
    predicting: list[int] = []
    spans = []
    for rollout in pack:
        fed = rollout.prompt + rollout.response[:-1]  # the last token was sampled and never fed
        start = len(tokens)
        predicting += range(start + len(rollout.prompt) - 1, start + len(fed))
        tokens += fed
        positions += range(len(fed))
        spans.append(Span(start, start + len(fed), _evictions(rollout, len(fed), device) if view == "sparse" else None))
    logits_nV = run(
        model,
        torch.tensor([tokens], device=device),
        torch.tensor([positions], device=device),
        ReplayView(spans),
        keep=torch.tensor(predicting, device=device),
    )[0]
    results, start = [], 0
    for rollout in pack:
        divisor = rollout.temperature if temperature is None else temperature or 1.0  # log-probs of greedy are at 1
        logits = logits_nV[start : start + len(rollout.response)].float() / divisor
        targets = torch.tensor(rollout.response, device=device)
        results.append(logits.log_softmax(dim=-1).gather(-1, targets[:, None]).squeeze(-1))
        start += len(rollout.response)
    return results


def _evictions(rollout: Rollout, tokens: int, device: torch.device) -> Tensor | None:
    """[L, H, tokens], None where nothing was evicted: then the sampler's view is the dense one, to the bit."""
    evicted_at_LHT = rollout.evicted_at
    assert evicted_at_LHT is not None
    evicted_at_LHT = evicted_at_LHT[:, :, :tokens]
    return evicted_at_LHT.to(device) if bool((evicted_at_LHT != NEVER).any()) else None


@dataclass(frozen=True)
class Span:
    """One rollout among the packed tokens."""

    start: int
    stop: int
    evicted_at_LHT: Tensor | None


class ReplayView:
    def __init__(self, spans: list[Span]):
        self.spans = spans

    def attend(self, layer, queries_1QND, keys_1HND, values_1HND, scale, mask):
        outputs = []
        for span in self.spans:
            q, k, v = (tensor[:, :, span.start : span.stop] for tensor in (queries_1QND, keys_1HND, values_1HND))
            if span.evicted_at_LHT is None:
                outputs.append(causal_attention(q, k, v, scale=scale))
            else:
                outputs.append(shadow_attention(q, k, v, span.evicted_at_LHT[layer], scale=scale))
        return torch.cat(outputs, dim=2)
