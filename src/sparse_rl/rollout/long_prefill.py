"""Long prefill: run one prompt through the model in pieces. Each piece attends to all earlier pieces, and causally to itself.

Pieces of a protected prompt enter the pages of its group. Pieces of a prompt that fits enter the slot of its first sample. A
prompt that exceeds the budget is compressed as a whole, so all its keys and values stay in scratch memory until the last piece.
"""

# L layers, Q query heads, H kv heads, T tokens of the prompt, n tokens of a piece, w of them at most the ring buffer holds, D
# head dimension

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.form import PLAIN
from ..kernels.prefix_attention import last_tokens_attention
from ..kv.cache import SlotCache
from ..kv.policies import Policy
from ..kv.prompt_layout import nth_samples
from ..kv.prompt_store import PackedPages, PromptStore
from ..kv.schedule import Schedule
from ..kv.shape import refuse_too_large
from ..kv.storage import Quantiser, encoded
from ..models.recurrent import Mixer
from ..models.routing import RecordedRouting, ReplayedRouting, Routers, Routing
from ..models.support import next_logits
from ..sizes import token_bytes
from .prefill import Prefilled, PrefillRow, PromptInSlots, SharedKeys, recorded


def prefill_long(
    model: PreTrainedModel,
    cache: SlotCache,
    policy: Policy,
    schedule: Schedule,
    prompt: PromptInSlots,
    piece_tokens: int,
    start: int = 0,
    routers: Routers | None = None,
    choices_TRK: Tensor | None = None,
) -> Prefilled:
    """Fill the slots, or the pages of the prompt store, with one prompt, in pieces of at most `piece_tokens` tokens.

    The tokens before `start` are already in the pages. Expert choices are recorded with `routers`, or replayed from
    `choices_TRK`. Return the result of `prefill` for this prompt.
    """
    device, tokens, first = cache.shape.device, len(prompt.prompt), prompt.slots[0]
    row = PrefillRow(0, tokens, 1, nth_samples([prompt.slots], [prompt.seeds], device), [prompt.slots])
    pieces: PiecesInPages | PiecesInSlot | PiecesInScratch
    if cache.prompts is not None:
        pieces = PiecesInPages(cache.prompts, PackedPages.of([(tokens, prompt.pages)], device), prompt.pages)
    elif schedule.compresses_prompt(tokens):
        pieces = PiecesInScratch.of(cache, tokens)
    else:
        pieces = PiecesInSlot(cache, first)
    view = LongPrefillView(cache, policy, schedule, row, first, pieces)
    routings: list[RecordedRouting] = []
    for first_token in range(start, tokens, piece_tokens):
        view.start, view.stop = first_token, min(first_token + piece_tokens, tokens)
        piece = torch.tensor([prompt.prompt[view.start : view.stop]], device=device)
        positions = torch.arange(view.start, view.stop, device=device)[None]
        if routers is not None:
            routings.append(routers.recording(view.stop - view.start, device))
            view.routing = routings[-1]
        elif choices_TRK is not None:
            view.routing = ReplayedRouting(choices_TRK[view.start : view.stop].to(device))
        logits_11V = next_logits(model, piece, positions, view, keep=1)
    if schedule.compresses_prompt(tokens):  # the last piece has filled the slots of all samples
        for slot in prompt.slots[1:]:
            cache.copy_windows_and_states(cache, first, slot)
    else:
        held = schedule.held_after_prefill(tokens)
        cache.positions_LSHC[:, first, :, :held] = torch.arange(held, dtype=torch.int32, device=device)
        cache.lengths_S[first] = held
        for slot in prompt.slots[1:]:
            cache.copy_slot(cache, first, slot, held)
    choices = None if routers is None else recorded(model, routers, routings)
    return Prefilled(logits_11V[0], [row.dropped_of_samples(0, len(prompt.slots), policy)], [choices])


@dataclass(frozen=True)
class PiecesInScratch:
    """Pieces of a prompt that will be compressed, in scratch memory and in the model's dtype."""

    keys_LHTD: Tensor
    values_LHTD: Tensor
    quantiser: Quantiser | None

    @classmethod
    def of(cls, cache: SlotCache, tokens: int) -> "PiecesInScratch":
        shape = cache.shape
        needed = tokens * token_bytes(shape, shape.dtype.itemsize)
        refuse_too_large(shape, needed, f"The prefill of a prompt of {tokens:,} tokens", "use shorter prompts")
        rows = (shape.layers, shape.kv_heads, tokens, shape.head_dim)
        keys_LHTD = torch.empty(rows, dtype=shape.dtype, device=shape.device)
        return cls(keys_LHTD, torch.empty_like(keys_LHTD), cache.quantiser)

    def add(self, layer: int, start: int, stop: int, keys_1HnD: Tensor, values_1HnD: Tensor) -> tuple[Tensor, Tensor]:
        """Write a piece. Return the keys and values [1, H, stop, D] of all pieces so far, as attention reads them."""
        self.keys_LHTD[layer, :, start:stop] = keys_1HnD[0]
        self.values_LHTD[layer, :, start:stop] = values_1HnD[0]
        written = self.written(layer, stop)
        return written if self.quantiser is None else self.quantiser.restored(layer, *written)

    def written(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [1, H, stop, D] as they were written."""
        return self.keys_LHTD[layer, None, :, :stop], self.values_LHTD[layer, None, :, :stop]


@dataclass(frozen=True)
class PiecesInSlot:
    """Pieces of a prompt in the slot of its first sample."""

    cache: SlotCache
    slot: int

    def add(self, layer: int, start: int, stop: int, keys_1HnD: Tensor, values_1HnD: Tensor) -> tuple[Tensor, Tensor]:
        """Write a piece. Return the keys and values [1, H, stop, D] of all pieces so far, as attention reads them."""
        for stored, new in zip(self.cache.stored, encoded(self.cache.quantiser, layer, keys_1HnD, values_1HnD), strict=True):
            stored[layer, self.slot, :, start:stop] = new[0]
        return self.cache.read(layer, slice(self.slot, self.slot + 1), stop)


@dataclass(frozen=True)
class PiecesInPages:
    """Pieces of a prompt in the pages of its group."""

    store: PromptStore
    packed: PackedPages
    pages: list[int]

    def add(self, layer: int, start: int, stop: int, keys_1HnD: Tensor, values_1HnD: Tensor) -> tuple[Tensor, Tensor]:
        """Write a piece. Return copies of the keys and values [1, H, stop, D] of all pieces so far, as attention reads them."""
        piece = PackedPages(self.packed.pages_M[start:stop], self.packed.places_M[start:stop])
        self.store.write(layer, piece, encoded(self.store.quantiser, layer, keys_1HnD, values_1HnD))
        return self.store.read(layer, torch.tensor([self.pages], device=keys_1HnD.device), stop)


class LongPrefillView:
    """View of the piece from `start` to `stop`. The last piece also compresses the prompt, if it exceeds the budget."""

    routing: Routing | None = None

    def __init__(
        self,
        cache: SlotCache,
        policy: Policy,
        schedule: Schedule,
        row: PrefillRow,
        first_slot: int,
        pieces: PiecesInScratch | PiecesInSlot | PiecesInPages,
    ):
        self.cache, self.policy, self.schedule, self.row, self.pieces = cache, policy, schedule, row, pieces
        self.first_slot = first_slot
        self.slot_1 = torch.tensor([first_slot], device=cache.shape.device)
        self.start = self.stop = 0
        self.shared = SharedKeys(cache.sources)

    def attend(self, layer, queries_1QnD, keys_1HnD, values_1HnD, scale, mask, form=PLAIN):
        if layer in self.shared:
            seen = self.shared.read(layer)
        elif form.window is not None:
            assert self.cache.windows is not None
            seen = self.cache.windows.extend(layer, self.first_slot, self.start, keys_1HnD, values_1HnD)
        else:
            seen = self._add(self.cache.index_of_layer[layer], queries_1QnD, keys_1HnD, values_1HnD)
        self.shared.keep(layer, *seen)
        return last_tokens_attention(queries_1QnD, *seen, scale, form)

    def _add(self, layer: int, queries_1QnD: Tensor, keys_1HnD: Tensor, values_1HnD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a piece. Return the keys and values of all pieces so far."""
        keys_1HTD, values_1HTD = self.pieces.add(layer, self.start, self.stop, keys_1HnD, values_1HnD)
        recent = min(self.cache.ring, self.stop - self.start)
        places_w = torch.arange(self.stop - recent, self.stop, device=queries_1QnD.device)
        recent_wQD = queries_1QnD[0, :, places_w - self.start].transpose(0, 1)
        self.cache.append_queries(layer, self.slot_1.expand(recent), recent_wQD, places_w)
        tokens = self.row.stop
        if self.stop == tokens and self.schedule.compresses_prompt(tokens):
            queries_1QwD = queries_1QnD
            if self.cache.ring:  # the last piece may be shorter than the window
                layer_1, end_1 = self.slot_1.new_tensor([layer]), self.slot_1.new_tensor([tokens])
                queries_1QwD = self.cache.ring_in_order(layer_1, self.slot_1, end_1)
            assert isinstance(self.pieces, PiecesInScratch)
            prompt = (queries_1QwD, *self.pieces.written(layer, tokens))
            self.row.dropped.append(self.cache.fill(layer, self.row.samples, *prompt, self.schedule.budget, self.policy))
        return keys_1HTD, values_1HTD

    def recur(self, layer: int, mixer: Mixer, hidden_1nD: Tensor) -> Tensor:
        """Continue from the state after the earlier pieces, which is in the slot of the first sample."""
        assert self.cache.states is not None
        if self.start:
            return mixer.resume(hidden_1nD, self.cache.states.rows(layer, self.first_slot, self.first_slot + 1))
        out_1nD, states = mixer.start(hidden_1nD)
        self.cache.states.write(layer, self.slot_1, states, torch.zeros_like(self.slot_1))
        return out_1nD
