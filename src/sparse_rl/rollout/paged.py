"""Slots of a dense cache in pages: place sequences that start or continue, and move full pages to the pool.

If the pool has too few pages, the youngest sequences are paused. A paused sequence keeps its tokens. When it continues, a
prefill computes the keys of its response again, after the prompt of its group.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..kv.cache import SlotCache
from ..kv.pages import copy_last_pages, move_full_pages
from ..kv.policies import Policy
from ..kv.prompt_store import PagePool
from ..kv.schedule import Schedule
from ..models.compile import fused_layers
from ..sizes import PAGE_TOKENS
from .long_prefill import prefill_long
from .prefill import PromptInSlots
from .scheduler import Scheduler, Sequence
from .stats import Stats


@dataclass(frozen=True)
class PagedSlots:
    model: PreTrainedModel
    cache: SlotCache
    policy: Policy
    schedule: Schedule
    scheduler: Scheduler
    stats: Stats
    prefill_tokens: int

    @property
    def pool(self) -> PagePool:
        assert self.scheduler.pages is not None
        return self.scheduler.pages

    def place(self, sequences: dict[int, Sequence]) -> None:
        """Set the page tables of these sequences, by slot. The prompts are already in their pages.

        A sequence that starts gets a copy of the prompt's last page, if that is partly filled. One that continues is recomputed.
        """
        pages_of_slots, last_pages = {}, {}
        for slot, sequence in sequences.items():
            of_group = self.pool.of_group[sequence.request.group]
            pages_of_slots[slot] = [*of_group[: sequence.prompt_pages], *sequence.pages]
            if sequence.held and not sequence.pages:
                last_pages[slot] = of_group[-1]
        assert self.cache.prompts is not None
        self.cache.prompts.assign(pages_of_slots)
        if last_pages:
            copy_last_pages(self.cache, list(last_pages), list(last_pages.values()))
        for slot, sequence in sequences.items():
            if sequence.pages and sequence.finish is None:  # a rollout may be aborted while it waits
                self._recompute(sequence, slot, pages_of_slots[slot])

    def _recompute(self, sequence: Sequence, slot: int, pages: list[int]) -> None:
        """Compute the keys and values of a paused sequence again, after the full pages of the prompt. Windows and states
        need the whole sequence, because they start before those pages end."""
        request = sequence.request
        start = 0 if self.cache.has_windows_or_states else sequence.prompt_pages * PAGE_TOKENS
        tokens = [*request.prompt, *sequence.response()[0][: sequence.entered]]
        prompt, routing = PromptInSlots(tokens, [slot], [request.seed], pages), sequence.routing()
        choices = None if routing is None else torch.cat([routing.prompt_TRK, routing.response_TRK])
        run = self.model, self.cache, self.policy, self.schedule
        with fused_layers(self.model):
            prefill_long(*run, prompt, self.prefill_tokens, start, choices_TRK=choices)
        sequence.held = self.schedule.held_after_prefill(len(tokens))
        sequence.stored = len(tokens) - sequence.held
        if sequence.held:
            copy_last_pages(self.cache, [slot], pages[-1:])
            self.pool.give_back([sequence.pages.pop()])
        new = len(tokens) - start
        self.stats.recomputed_tokens += new
        scratch_bytes = (len(tokens) + min(new, self.prefill_tokens)) * self.cache.layer_token_bytes
        self.stats.scratch_bytes = max(self.stats.scratch_bytes, scratch_bytes)

    def make_room(self, steps: int) -> None:
        """Move full pages of all slots to the pool, if `steps` decode steps could overflow a slot. If too few pages are free,
        pause the youngest sequences."""
        active = self.scheduler.active
        if max(sequence.held for sequence in active) + steps <= self.cache.capacity:
            return
        paused, moves = self.scheduler.make_room()
        move_slots(self.cache, self.scheduler, moves)
        self.stats.preemptions += len(paused)
        full = {slot: sequence for slot, sequence in enumerate(active) if sequence.fills_a_page}
        if not full:
            return
        pages = self.pool.take_pages(len(full) * PAGE_TOKENS)
        columns = [sequence.stored // PAGE_TOKENS for sequence in full.values()]
        move_full_pages(self.cache, list(full), columns, pages)
        for sequence, page in zip(full.values(), pages, strict=True):
            sequence.pages.append(page)
            sequence.stored += PAGE_TOKENS
            sequence.held -= PAGE_TOKENS


def move_slots(cache: SlotCache, scheduler: Scheduler, moves: list[tuple[int, int]]) -> None:
    """Move sequences (from slot, to slot) after the scheduler has closed gaps."""
    for source, slot in moves:
        cache.copy_slot(cache, source, slot, scheduler.active[slot].held)
