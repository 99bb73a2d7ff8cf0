"""Prefill: pack prompts into one row of tokens, let each attend only to itself, and compress them layer by layer.

Scratch memory holds the keys of one layer at a time, and keys that later layers read. Prompts that fit enter their slots
together. Protected prompts enter the pages of their group instead, once for all its samples. Prompts of the same length are
adjacent, so that they are compressed together. `long_prefill.py` prefills a prompt that exceeds one forward pass.
"""

# N packed tokens of all prompts, P prompts of one length, T tokens of each, Q query heads, H kv heads, D head dimension, L
# layers

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError
from ..kernels.attention import causal_attention, packed_causal_attention
from ..kernels.form import PLAIN
from ..kv.cache import SlotCache
from ..kv.policies import Policy
from ..kv.prompt_layout import NthSamples, PackedPrompts, nth_samples
from ..kv.prompt_store import PackedPages
from ..kv.schedule import Schedule
from ..kv.storage import encoded
from ..models.recurrent import Mixer
from ..models.routing import RecordedRouting, Routers
from ..models.support import next_logits
from .request import Request


@dataclass
class Stash:
    """Copy of a prefilled prompt, kept while samples of its group wait for a slot. If the prompt is in the prompt store, the
    copy holds only its last queries."""

    group: int
    cache: SlotCache
    held: int
    logits_V: Tensor
    dropped_LHN: Tensor | None


@dataclass(frozen=True)
class PromptInSlots:
    """One prompt and the slots of its samples."""

    prompt: list[int]
    slots: list[int]
    seeds: list[int]
    pages: list[int] = field(default_factory=list)
    """Pages of the prompt in the prompt store, if the cache has one."""
    group: int = 0

    @classmethod
    def of(cls, requests: list[Request], slots: list[int], pages: list[int]) -> "PromptInSlots":
        """Build from the requests of one group."""
        return cls(requests[0].prompt, slots, [request.seed for request in requests], pages, requests[0].group)


@dataclass
class PrefillRow:
    """Prompts of the same length among the packed tokens."""

    start: int
    stop: int
    count: int
    """Number of prompts."""
    samples: list[NthSamples]
    """Samples of the prompts, if these exceed the budget; else empty."""
    slots: list[list[int]]
    """Slots of the samples of each prompt."""
    dropped: list[list[Tensor]] = field(default_factory=list)
    """Positions that `SlotCache.fill` dropped in each layer, if the prompts exceed the budget."""

    def dropped_of(self, prompt: int, sample: int) -> Tensor | None:
        """Return the dropped positions [L, H, dropped] of one sample, or None if its prompt fits the budget."""
        if not self.dropped or not self.dropped[0]:
            return None
        return torch.stack([of_layer[min(sample, len(of_layer) - 1)][prompt] for of_layer in self.dropped])

    def dropped_of_samples(self, prompt: int, count: int, policy: Policy) -> list[Tensor | None]:
        """Return `dropped_of` each sample. Without seeds, all samples of a prompt drop the same keys."""
        own = count if policy.uses_seeds else 1
        return [self.dropped_of(prompt, sample) for sample in range(own)] * (count // own)


class Prefilled(NamedTuple):
    logits_PV: Tensor
    """Logits of the first response token of each prompt."""
    dropped: list[list[Tensor | None]]
    """Dropped positions of each sample of each prompt."""
    choices: list[Tensor | None]
    """Experts chosen for the tokens of each prompt, [T, routers, experts per token]; None if they are not recorded."""


def prefill(
    model: PreTrainedModel,
    cache: SlotCache,
    policy: Policy,
    schedule: Schedule,
    prompts: list[PromptInSlots],
    routers: Routers | None = None,
) -> Prefilled:
    """Fill the slots, or the pages of the prompt store, with prompts. Record the choices of the `routers`, if they are given."""
    device = cache.shape.device
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].prompt))
    ordered = [prompts[index] for index in order]
    lengths = [len(each.prompt) for each in ordered]
    starts = list(accumulate(lengths, initial=0))[:-1]
    rows = _rows(ordered, schedule, device)
    tokens_1N = torch.tensor([[token for each in ordered for token in each.prompt]], device=device)
    positions_1N = torch.tensor([[position for length in lengths for position in range(length)]], device=device)
    ends_P = torch.tensor(lengths, device=device).cumsum(0)
    packed = _packed_by_sample(ordered, starts, cache.ring, schedule, device)
    windows = None
    if cache.windows is not None:
        copies = [(at, len(each.prompt), slot) for at, each in zip(starts, ordered, strict=True) for slot in each.slots]
        windows = PackedPrompts.of(copies, cache.windows.capacity, device)
    pages = None
    if cache.prompts is not None:
        pages = PackedPages.of([(len(each.prompt), each.pages) for each in ordered], device)
    cu_seqlens = torch.nn.functional.pad(ends_P, (1, 0)).to(torch.int32)
    view = PrefillView(cache, policy, schedule, rows, packed, pages, windows, cu_seqlens, longest=lengths[-1])
    if routers is not None:
        view.routing = routers.recording(tokens_1N.shape[1], device)
    logits_PV = next_logits(model, tokens_1N, positions_1N, view, keep=ends_P - 1)[0]
    for each_packed in packed:
        cache.place_packed(each_packed)
    dropped = [row.dropped_of_samples(index, len(slots), policy) for row in rows for index, slots in enumerate(row.slots)]
    choices: Sequence[Tensor | None] = [None] * len(prompts)
    if routers is not None and view.routing is not None:
        choices = recorded(model, routers, [view.routing]).split(lengths)
    places = sorted(range(len(order)), key=order.__getitem__)  # place of each prompt in `ordered`
    return Prefilled(
        logits_PV[torch.tensor(places, device=device)],
        [dropped[place] for place in places],
        [choices[place] for place in places],
    )


def _rows(ordered: list[PromptInSlots], schedule: Schedule, device: torch.device) -> list[PrefillRow]:
    """Group prompts, ordered by length, into rows of equal length."""
    rows: list[PrefillRow] = []
    start = 0
    for length, group in groupby(ordered, key=lambda prompt: len(prompt.prompt)):
        same = list(group)
        slots = [prompt.slots for prompt in same]
        samples = []
        if schedule.compresses_prompt(length):
            samples = nth_samples(slots, [prompt.seeds for prompt in same], device)
        rows.append(PrefillRow(start, start + length * len(same), len(same), samples, slots))
        start = rows[-1].stop
    return rows


def _packed_by_sample(
    ordered: list[PromptInSlots], starts: list[int], ring: int, schedule: Schedule, device: torch.device
) -> list[PackedPrompts]:
    """Return the copies of the prompts that need no compression: all first samples, all second samples, and so on."""
    copies: list[list[tuple[int, int, int]]] = []
    for start, prompt in zip(starts, ordered, strict=True):
        for sample, slot in enumerate(() if schedule.compresses_prompt(len(prompt.prompt)) else prompt.slots):
            if sample == len(copies):
                copies.append([])
            copies[sample].append((start, len(prompt.prompt), slot))
    return [PackedPrompts.of(each, ring, device) for each in copies]


def recorded(model: PreTrainedModel, routers: Routers, passes: list[RecordedRouting]) -> Tensor:
    """Return the choices of consecutive passes in host memory. Raise UserError if a router was not called."""
    if any(each.recorded != routers.count for each in passes):
        raise UserError(
            f"{type(model).__name__} computes its experts without its routers (a fused kernel, for example), so their choices "
            "cannot be recorded: set model.routing_replay = false."
        )
    return torch.cat([each.choices_NRK.cpu() for each in passes])


class SharedKeys:
    """Keys and values of a pass, kept for later layers that have no keys and read them."""

    def __init__(self, sources: dict[int, int]):
        self.sources = sources
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __contains__(self, layer: int) -> bool:
        return layer in self.sources

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer in self.sources.values():
            self.kept[layer] = keys, values

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.kept[self.sources[layer]]


class PrefillView:
    routing: RecordedRouting | None = None

    def __init__(
        self,
        cache: SlotCache,
        policy: Policy,
        schedule: Schedule,
        rows: list[PrefillRow],
        packed: list[PackedPrompts],
        pages: PackedPages | None,
        windows: PackedPrompts | None,
        cu_seqlens: Tensor,
        longest: int,
    ):
        self.cache, self.policy, self.schedule, self.rows, self.packed = cache, policy, schedule, rows, packed
        self.pages, self.windows, self.cu_seqlens, self.longest = pages, windows, cu_seqlens, longest
        self.shared = SharedKeys(cache.sources)

    def attend(self, layer, queries_1QND, keys_1HND, values_1HND, scale, mask, form=PLAIN):
        new = (queries_1QND, keys_1HND, values_1HND)
        if layer in self.shared:
            new = (queries_1QND, *self.shared.read(layer))
        elif form.window is not None:
            assert self.cache.windows is not None and self.windows is not None
            self.cache.windows.fill(layer, self.windows, keys_1HND, values_1HND)
        else:
            new = self._fill(self.cache.index_of_layer[layer], *new)
        self.shared.keep(layer, *new[1:])
        if queries_1QND.is_cuda:
            return packed_causal_attention(*new, self.cu_seqlens, self.longest, scale, form)
        outputs = []
        for row in self.rows:
            q, k, v = (unpack(tensor, row) for tensor in new)
            outputs.append(causal_attention(q, k, v, scale=scale, form=form).transpose(0, 1).flatten(1, 2)[None])
        return torch.cat(outputs, dim=2)

    def recur(self, layer: int, mixer: Mixer, hidden_1ND: Tensor) -> Tensor:
        """Run prompts of one length together, and write their states into the slots of their samples."""
        assert self.cache.states is not None
        outputs = []
        for row in self.rows:
            out_PTD, states = mixer.start(hidden_1ND[0, row.start : row.stop].unflatten(0, (row.count, -1)))
            outputs.append(out_PTD.flatten(0, 1))
            placed = [(prompt, slot) for prompt, slots in enumerate(row.slots) for slot in slots]
            prompts_m, slots_m = torch.tensor(placed, device=hidden_1ND.device).t()
            self.cache.states.write(layer, slots_m, states, prompts_m)
        return torch.cat(outputs)[None]

    def _fill(self, layer: int, queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the keys and values of a layer into slots or pages. Return the inputs of attention, as the cache returns them."""
        new, quantiser = (queries_1QND, keys_1HND, values_1HND), self.cache.quantiser
        stored = encoded(quantiser, layer, keys_1HND, values_1HND)
        for packed in self.packed:
            self.cache.fill_ring(layer, packed, queries_1QND)
            if self.pages is None:
                self.cache.fill_packed(layer, packed, stored)
        if self.pages is not None:
            assert self.cache.prompts is not None
            self.cache.prompts.write(layer, self.pages, stored)
        for row in self.rows:
            if row.samples:
                q, k, v = (unpack(tensor, row) for tensor in new)
                row.dropped.append(self.cache.fill(layer, row.samples, q, k, v, self.schedule.budget, self.policy))
        return new if quantiser is None else (queries_1QND, *quantiser.decode(layer, stored, keys_1HND.dtype))


def unpack(packed_1HND: Tensor, row: PrefillRow) -> Tensor:
    """Return the row's prompts as a batch [P, H, T, D]."""
    return packed_1HND[0, :, row.start : row.stop].unflatten(1, (row.count, -1)).transpose(0, 1)
