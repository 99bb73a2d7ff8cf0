"""Replay: compute log-probs of rollouts in one parallel pass, under the dense or the sparse view."""

# N packed tokens, Q query heads, H kv heads, L layers, T tokens of one rollout, n response tokens, D hidden dimension

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError
from ..format import agreeing, counted
from ..kernels import long_attention, shadow
from ..kernels.attention import causal_attention, packed_causal_attention, shadow_attention
from ..kernels.form import PLAIN
from ..kernels.long_attention import long_causal_attention
from ..kernels.prefix_attention import PrefixAttention, Segment
from ..kernels.shadow import Shadow
from ..kernels.upload import upload
from ..kv.shape import CacheShape
from ..kv.storage import Quantiser, same_storage
from ..kv.trace import NEVER
from ..models.attention import eval_mode
from ..models.compile import compiler_errors, fused_layers
from ..models.head import hidden_states
from ..models.recurrent import Mixer, run_packed
from ..models.routing import ReplayedRouting, install
from ..models.support import head_of, prepare
from ..rollout.rollout import Rollout
from ..world import World
from .logprobs import token_logprobs
from .packing import PackedRow, pack_tokens, packs

ReplayKind = Literal["sparse", "quantised", "dense"]


def replay(
    model: PreTrainedModel,
    rollouts: list[Rollout],
    view: ReplayKind,
    temperature: float | None = None,
    *,
    tokens_per_pass: int = 4096,
) -> list[Tensor]:
    """Return the float32 log-probs of each rollout's response tokens, differentiable.

    `view="sparse"` reconstructs the sampler's view from `evicted_at`, with keys and values as they were stored;
    `view="dense"` sees every key as the model computes it; `view="quantised"` sees every key as it was stored. `temperature`
    defaults to that of each rollout; 0 gives log-probs at temperature 1. Rollouts are packed without padding, with up to
    `tokens_per_pass` tokens and at least one rollout per pass. If the rollouts have expert choices, the routers use them. The
    model runs in eval mode, without dropout and gradient checkpointing.
    """
    if view not in get_args(ReplayKind):
        raise UserError(f"view = {view!r} is invalid: use 'sparse', 'quantised' or 'dense'.")
    if view == "sparse" and any(rollout.trace is None for rollout in rollouts):
        raise UserError("A rollout has no recorded evictions to replay: generate with record=True.")
    if temperature is not None and temperature < 0:
        raise UserError(f"temperature = {temperature} is invalid: it must not be negative.")
    _check_positions(model, rollouts)
    results: list[Tensor] = []
    share_prompts = view != "sparse" or all(_evictions(rollout) is None for rollout in rollouts)
    share_prompts = share_prompts and may_share_prompts(model)
    with fused_layers(model), eval_mode(model):
        for indices in packs(rollouts, tokens_per_pass, share_prompts=share_prompts):
            pack = [rollouts[index] for index in indices]
            logprobs_n, _ = logprobs_of(model, pack, view, temperature)
            results += logprobs_n.split([len(rollout.response) for rollout in pack])
    return results


def may_share_prompts(model: PreTrainedModel) -> bool:
    """Return whether rollouts of a pass may share prompts. Recurrent layers need whole sequences, and so does FlexAttention,
    which computes soft caps and sinks on a GPU."""
    limits = prepare(model)
    return not limits.shape.states and (model.device.type != "cuda" or limits.plain)


def passes_of(
    model: PreTrainedModel, rollouts: Sequence[Rollout], view: ReplayKind, tokens_per_pass: int, world: World
) -> list[list[int]]:
    """Return the passes of this rank, as indices of the rollouts. With one rank they keep the order of the rollouts."""
    if world.size == 1:
        return list(packs(rollouts, tokens_per_pass, share_prompts=view == "dense" and may_share_prompts(model)))
    return world.passes([len(rollout.prompt) + len(rollout.response) for rollout in rollouts], tokens_per_pass)


def _check_positions(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> None:
    limits = prepare(model)
    # the last token is not fed
    longest = max((len(rollout.prompt) + len(rollout.response) - 1 for rollout in rollouts), default=0)
    if limits.positions is not None and longest > limits.positions:
        raise UserError(
            f"A rollout has {longest} tokens, but the model supports {limits.positions} positions: replay shorter rollouts."
        )


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of the LM head at the tokens that predict response tokens, and the response tokens, of one pass."""

    hidden_nD: Tensor
    targets_n: Tensor
    temperatures_n: Tensor
    routing: ReplayedRouting | None = None
    """Expert choices of the pass; None if the rollouts have none."""


def forward(model: PreTrainedModel, pack: Sequence[Rollout], view: ReplayKind, temperature: float | None = None) -> HeadInputs:
    device, shape = model.device, prepare(model).shape
    evictions = [_evictions(rollout) if view == "sparse" else None for rollout in pack]
    keeps_all = all(evicted_at_LHT is None for evicted_at_LHT in evictions)
    row = pack_tokens(pack, share_prompts=keeps_all and may_share_prompts(model))
    quantiser = None if view == "dense" else quantiser_of(pack)
    if row.shared:
        replay_view = ReplayView([], row.segments, quantiser, shape)
    else:
        spans = [
            Span(segment.start, segment.stop, evicted_at_LHT)
            for segment, evicted_at_LHT in zip(row.segments, evictions, strict=True)
        ]
        replay_view = ReplayView(spans, quantiser=quantiser, shape=shape)
    replay_view.routing = _routing(model, pack, row)
    tokens_1N, positions_1N, predicting_n = (upload(each, device) for each in row.tensors())
    hidden_nD = hidden_states(model, tokens_1N, positions_1N, replay_view, predicting_n)
    # greedy rollouts use temperature 1
    temperatures = [rollout.temperature if temperature is None else temperature or 1.0 for rollout in pack]
    lengths = torch.tensor([len(rollout.response) for rollout in pack])
    temperatures_b = torch.tensor(temperatures, dtype=torch.promote_types(hidden_nD.dtype, torch.float32))
    return HeadInputs(
        hidden_nD,
        upload(torch.tensor([token for rollout in pack for token in rollout.response]), device),
        upload(temperatures_b.repeat_interleave(lengths), device),
        replay_view.routing,
    )


def _routing(model: PreTrainedModel, pack: Sequence[Rollout], row: PackedRow) -> ReplayedRouting | None:
    """Return the sampler's expert choices for the tokens of a row, or None if the rollouts have none."""
    if not row.choices:
        return None
    without = sum(rollout.routing is None for rollout in pack)
    if without:
        which = f"{without} of {counted(len(pack), 'rollout')} {agreeing(without, 'has', 'have')}"
        raise UserError(f"{which} no expert choices: generate all of them with routing=True.")
    routers, choices_NRK = install(model), torch.cat(row.choices)
    if choices_NRK.shape[1:] != (routers.count, routers.top_k):
        raise UserError(
            f"The rollouts have expert choices of [routers, experts per token] = {list(choices_NRK.shape[1:])}, but the model has "
            f"{[routers.count, routers.top_k]}: replay them with the model that sampled them."
        )
    return ReplayedRouting(upload(choices_NRK, model.device))


def logprobs_of(
    model: PreTrainedModel, pack: Sequence[Rollout], view: ReplayKind, temperature: float | None = None
) -> tuple[Tensor, Tensor]:
    """Run one pass and return (log-probs, entropies) of all response tokens of these rollouts, [n] each."""
    return response_logprobs(model, forward(model, pack, view, temperature))


def response_logprobs(model: PreTrainedModel, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropies) of all response tokens of a pass, [n] each."""
    return token_logprobs(head_of(model), inputs.hidden_nD, inputs.targets_n, inputs.temperatures_n)


def _evictions(rollout: Rollout) -> Tensor | None:
    """Return the eviction times [L, H, T] of the fed tokens, or None if no key was evicted."""
    if rollout.trace is None:  # sampled with a policy that never evicts
        return None
    evicted_at_LHT = rollout.trace.evicted_at[:, :, : len(rollout.prompt) + len(rollout.response) - 1]
    return evicted_at_LHT if bool((evicted_at_LHT != NEVER).any()) else None


def quantiser_of(rollouts: Sequence[Rollout]) -> Quantiser | None:
    """Return the storage of the keys and values of these rollouts; None for the model's dtype."""
    found = list({id(rollout.quantiser): rollout.quantiser for rollout in rollouts}.values())
    if any(not same_storage(found[0], other) for other in found[1:]):
        raise UserError("The rollouts were sampled with different statistics of keys: replay those of each call separately.")
    return found[0] if found else None


@dataclass(frozen=True)
class Span:
    """Position of one rollout among the packed tokens."""

    start: int
    stop: int
    evicted_at_LHT: Tensor | None


class ReplayView:
    """Attention view of packed rollouts, each attending only to itself. Evicted keys are hidden as they were from the sampler.

    If no rollout of a pack lost a key, the sparse view uses the dense code path and gives bitwise equal results. If only some
    rollouts lost keys, the results of the others equal their dense results up to rounding. `segments` replace the spans if
    rollouts share prompts, of which no key was evicted. One class serves both, because another class would recompile the compiled
    layers. With a quantiser, keys and values are read as a quantised cache of this shape stores them.
    """

    routing: ReplayedRouting | None = None

    def __init__(
        self,
        spans: list[Span],
        segments: Sequence[Segment] = (),
        quantiser: Quantiser | None = None,
        shape: CacheShape | None = None,
    ):
        self.spans, self.segments, self.quantiser = spans, segments, quantiser
        self.index_of_layer, self.sources = ({}, {}) if shape is None else (shape.index_of_layer, shape.sources)
        self.bounds = [0, *(span.stop for span in spans)]
        self.longest = max((span.stop - span.start for span in spans), default=0)
        self._packs: dict[torch.device, DevicePack] = {}

    def attend(self, layer, queries_1QND, keys_1HND, values_1HND, scale, mask, form=PLAIN):
        pack, layer = self._on_device(queries_1QND.device), self.sources.get(layer, layer)
        if pack.quantiser is not None and form.window is None:  # windows are in the model's dtype
            keys_1HND, values_1HND = pack.quantiser.restored(self.index_of_layer[layer], keys_1HND, values_1HND)
        packed = (queries_1QND, keys_1HND, values_1HND)
        if pack.prefixes is not None:
            return pack.prefixes.attend(*packed, scale, form)
        keeps_all = pack.until_LHN is None or form.window is not None  # policies evict nothing from a window
        form = form.within(self.longest)
        if keeps_all and form.is_plain:
            if form.window is None and long_attention.usable(queries_1QND, self.bounds):
                return long_causal_attention(*packed, self.bounds, scale)
            return packed_causal_attention(*packed, pack.bounds, self.longest, scale, form)
        if shadow.usable(queries_1QND):
            try:
                return pack.shadow(form.window, keeps_all).attend(0 if keeps_all else layer, *packed, scale, form)
            except compiler_errors() as error:
                shadow.give_up(error)
        if keeps_all or pack.until_LHN is None:
            return packed_causal_attention(*packed, pack.bounds, self.longest, scale, form)
        return self._one_by_one(pack.until_LHN[layer], *packed, scale, form)

    def recur(self, layer: int, mixer: Mixer, hidden_1ND: Tensor) -> Tensor:
        return run_packed(mixer, hidden_1ND, self.bounds)

    def _one_by_one(self, until_HN, queries_1QND, keys_1HND, values_1HND, scale, form=PLAIN):
        outputs = []
        for span in self.spans:
            q, k, v = (tensor[:, :, span.start : span.stop] for tensor in (queries_1QND, keys_1HND, values_1HND))
            if span.evicted_at_LHT is None:
                outputs.append(causal_attention(q, k, v, scale=scale, form=form))
            else:
                until_HT = until_HN[:, span.start : span.stop] - span.start
                outputs.append(shadow_attention(q, k, v, until_HT, scale=scale, form=form))
        return torch.cat(outputs, dim=2)

    def _on_device(self, device: torch.device) -> "DevicePack":
        """Return the pack on the device. It is uploaded once, at the first layer."""
        if device not in self._packs:
            bounds = upload(torch.tensor(self.bounds, dtype=torch.int32), device)
            until_LHN = packed_until(self.spans)
            prefixes = PrefixAttention(self.segments, device) if self.segments else None
            quantiser = None if self.quantiser is None else self.quantiser.to(device)
            self._packs[device] = DevicePack(
                bounds, None if until_LHN is None else upload(until_LHN, device), prefixes, quantiser
            )
        return self._packs[device]


@dataclass(frozen=True)
class DevicePack:
    """Boundaries and evictions of packed rollouts, on one device."""

    bounds: Tensor
    until_LHN: Tensor | None
    """First packed query that does not see the key; None if no key was evicted."""
    prefixes: PrefixAttention | None
    """Attention of rollouts that share prompts."""
    quantiser: Quantiser | None
    """Storage of keys and values, with scales on the device."""
    shadows: dict[tuple[int | None, bool], Shadow] = field(default_factory=dict)

    def shadow(self, window: int | None, keeps_all: bool) -> Shadow:
        """Return the visibility of keys: under the evictions, or if `keeps_all`, one for all layers with this window."""
        if (window, keeps_all) not in self.shadows:
            until_LHN = kept_until(self.bounds, window) if keeps_all else self.until_LHN
            assert until_LHN is not None
            self.shadows[window, keeps_all] = Shadow(until_LHN)
        return self.shadows[window, keeps_all]


def kept_until(bounds: Tensor, window: int | None) -> Tensor:
    """Return `until` [1, 1, N] of packed sequences without evictions: the end of each key's sequence or window."""
    ends_N = bounds[1:].repeat_interleave(bounds.diff())
    if window is not None:
        ends_N = torch.minimum(ends_N, torch.arange(len(ends_N), device=bounds.device, dtype=bounds.dtype) + window)
    return ends_N[None, None]


def packed_until(spans: Sequence[Span]) -> Tensor | None:
    """Return `until` [L, H, N] of the packed keys, or None if no key was evicted."""
    shapes = [span.evicted_at_LHT.shape[:2] for span in spans if span.evicted_at_LHT is not None]
    if not shapes:
        return None
    until_LHN = torch.empty(*shapes[0], spans[-1].stop, dtype=torch.int32)
    for span in spans:
        part = until_LHN[:, :, span.start : span.stop]
        if span.evicted_at_LHT is None:
            part.fill_(span.stop)
        else:
            torch.add(span.evicted_at_LHT.clamp(max=span.stop - span.start), span.start, out=part)
    return until_LHN
