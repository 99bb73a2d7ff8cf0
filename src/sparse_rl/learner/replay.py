"""Replay: the log-probs of rollouts in one parallel pass, as a dense model sees them or as the sampler did."""

# N packed tokens, Q query heads, H kv heads, L layers, T tokens of one rollout, n response tokens, D hidden dimension

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError
from ..kernels.attention import causal_attention, shadow_attention
from ..kv.trace import NEVER
from ..models.attention import prepare
from ..models.head import head_of, hidden_states
from ..rollout.rollout import Rollout
from .logprobs import token_logprobs

ReplayKind = Literal["sparse", "dense"]


def replay(
    model: PreTrainedModel,
    rollouts: list[Rollout],
    view: ReplayKind,
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
    results: list[Tensor] = []
    for indices in packs(rollouts, tokens_per_pass):
        pack = [rollouts[index] for index in indices]
        logprobs_n, _ = response_logprobs(model, forward(model, pack, view, temperature))
        results += logprobs_n.split([len(rollout.response) for rollout in pack])
    return results


def packs(rollouts: Sequence[Rollout], tokens_per_pass: int) -> Iterator[list[int]]:
    """Indices of the rollouts in order, `tokens_per_pass` tokens at a time, at least one rollout."""
    pack: list[int] = []
    tokens = 0
    for index, rollout in enumerate(rollouts):
        length = len(rollout.prompt) + len(rollout.response)
        if pack and tokens + length > tokens_per_pass:
            yield pack
            pack, tokens = [], 0
        pack.append(index)
        tokens += length
    if pack:
        yield pack


@dataclass(frozen=True)
class Seen:
    """One pass over packed rollouts: what the head reads at the tokens that predict a response token, and what came."""

    hidden_nD: Tensor
    targets_n: Tensor
    temperatures_n: Tensor


def forward(model: PreTrainedModel, pack: Sequence[Rollout], view: ReplayKind, temperature: float | None = None) -> Seen:
    prepare(model)
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
    hidden_nD = hidden_states(
        model,
        torch.tensor([tokens], device=device),
        torch.tensor([positions], device=device),
        ReplayView(spans),
        torch.tensor(predicting, device=device),
    )
    temperatures = [rollout.temperature if temperature is None else temperature or 1.0 for rollout in pack]  # greedy: at 1
    lengths = torch.tensor([len(rollout.response) for rollout in pack])
    return Seen(
        hidden_nD,
        torch.tensor([token for rollout in pack for token in rollout.response], device=device),
        torch.tensor(temperatures, dtype=torch.promote_types(hidden_nD.dtype, torch.float32))
        .repeat_interleave(lengths)
        .to(device),
    )


def response_logprobs(model: PreTrainedModel, seen: Seen) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of all response tokens of a pass, [n] each."""
    return token_logprobs(head_of(model), seen.hidden_nD, seen.targets_n, seen.temperatures_n)


def _evictions(rollout: Rollout, tokens: int, device: torch.device) -> Tensor | None:
    """[L, H, tokens], None where nothing was evicted: then the sampler's view is the dense one, to the bit."""
    if rollout.trace is None:  # sampled by a policy that never evicts
        return None
    evicted_at_LHT = rollout.trace.evicted_at[:, :, :tokens]
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
