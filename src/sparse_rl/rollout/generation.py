"""One call of `generate`, top to bottom: admit, decode a chunk, retire the finished, compact who is due."""

# L layers, H kv heads, N tokens dropped, V vocabulary

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError
from ..kernels.counter_rng import uniform
from ..kernels.linear import decode_context
from ..kv.cache import SlotCache, due
from ..kv.policies import Policy
from ..kv.settings import KV
from ..kv.trace import TraceRecorder
from .decode import decode_step
from .guard import RepetitionGuard
from .prefill import PromptInSlots, prefill
from .rollout import Rollout
from .sampling import sample
from .scheduler import Request, Scheduler, Sequence
from .settings import Sampling
from .stats import Progress, Stats


@dataclass
class Stash:
    """A prefilled prompt kept aside while samples of its group still wait for a slot."""

    group: int
    cache: SlotCache
    held: int
    logits_V: Tensor
    dropped_LHN: Tensor | None


class Generation:
    def __init__(
        self,
        model: PreTrainedModel,
        cache: SlotCache,
        policy: Policy,
        kv: KV,
        sampling: Sampling,
        requests: list[Request],
        *,
        stop: frozenset[int],
        chunk: int,
        prefill_tokens: int,
        record: bool,
        progress: Callable[[Progress], None] | None,
    ):
        self.model, self.cache, self.policy, self.kv, self.sampling = model, cache, policy, kv, sampling
        self.chunk, self.prefill_tokens, self.record, self.progress = chunk, prefill_tokens, record, progress
        self.scheduler = Scheduler(requests, cache.slots, sampling, stop)
        self.stats = Stats(peak_kv_bytes=cache.kv_bytes, side_bytes=cache.side_bytes)
        self.rollouts: list[Rollout | None] = [None] * len(requests)
        self.finished = 0
        self.stash: Stash | None = None
        self.new_tokens: dict[int, list[int]] = {}
        self.new_ends: list[int] = []

    def run(self) -> list[Rollout]:
        while self.scheduler.busy:
            while groups := self.scheduler.admit(self.prefill_tokens):
                self._prefill(groups)
            self._retire()
            if self.scheduler.active:
                self._decode_chunk()
                self._retire()
                self._compact()
            self._report()
        assert all(rollout is not None for rollout in self.rollouts)
        return self.rollouts  # type: ignore[return-value]

    # Prompts

    def _prefill(self, groups: list[list[Request]]) -> None:
        started = self._now()
        requests = [request for group in groups for request in group]
        slot = len(self.scheduler.active)
        prompts: list[PromptInSlots] = []
        logits: list[Tensor] = []
        dropped: list[Tensor | None] = []
        for group in groups:
            slots = list(range(slot, slot + len(group)))
            slot += len(group)
            if self.stash is not None and self.stash.group == group[0].group:
                for each in slots:
                    self.cache.copy_slot(self.stash.cache, 0, each, self.stash.held)
                logits += [self.stash.logits_V] * len(group)
                dropped += [self.stash.dropped_LHN] * len(group)
            else:
                prompts.append(PromptInSlots(group[0].prompt, slots, [request.seed for request in group]))
        self.stash = None if prompts else self.stash
        if prompts:
            first_logits, gone = prefill(self.model, self.cache, self.policy, self.kv, prompts)
            for prompt, logits_V, of_samples in zip(prompts, first_logits, gone, strict=True):
                logits += [logits_V] * len(prompt.slots)
                dropped += of_samples
            self._count_prefill(prompts)
            self._keep_aside(groups[-1][0].group, prompts[-1], first_logits[-1], gone[-1][0])
        self._start(requests, torch.stack(logits), dropped)
        self.stats.prefill_s += self._now() - started

    def _count_prefill(self, prompts: list[PromptInSlots]) -> None:
        tokens = sum(len(prompt.prompt) for prompt in prompts)
        shape = self.cache.shape
        key_bytes = shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        self.stats.prompt_tokens += tokens
        self.stats.scratch_bytes = max(self.stats.scratch_bytes, 2 * tokens * key_bytes)

    def _keep_aside(self, group: int, prompt: PromptInSlots, logits_V: Tensor, dropped_LHN: Tensor | None) -> None:
        """If samples of this prompt still wait, copy its slot, unless each of them drops keys of its own choice."""
        waiting = self.scheduler.waiting
        if not waiting or waiting[0].group != group or (dropped_LHN is not None and self.policy.uses_seeds):
            return
        held = self._held_after_prefill(prompt.prompt)
        cache = SlotCache(self.cache.shape, 1, held, self.cache.ring)
        cache.copy_slot(self.cache, prompt.slots[0], 0, held)
        self.stash = Stash(group, cache, held, logits_V, dropped_LHN)
        self.stats.scratch_bytes = max(self.stats.scratch_bytes, cache.kv_bytes)

    def _held_after_prefill(self, prompt: list[int]) -> int:
        return min(len(prompt), self.kv.budget) if self.policy.evicts else len(prompt)

    def _start(self, requests: list[Request], logits_nV: Tensor, dropped: list[Tensor | None]) -> None:
        """The first tokens are sampled from the prompts' last logits; each request becomes a sequence in its slot."""
        seeds = torch.tensor([request.seed for request in requests], device=logits_nV.device)
        positions = torch.tensor([len(request.prompt) for request in requests], device=logits_nV.device)
        tokens, logprobs = sample(logits_nV, uniform(seeds, positions), self.sampling)
        for request, token, logprob, gone in zip(requests, tokens.tolist(), logprobs.tolist(), dropped, strict=True):
            held = self._held_after_prefill(request.prompt)
            sequence = Sequence(request, held, TraceRecorder(len(request.prompt), self.kv.interval), kv_peak=held)
            if self.sampling.repetition is not None:
                sequence.guard = RepetitionGuard(*self.sampling.repetition)
            if gone is not None:
                self.stats.compactions += 1
                if self.record:
                    sequence.trace.record(0, gone)
            self._take(sequence, [token], [logprob])
            self.scheduler.active.append(sequence)

    # Responses

    def _decode_chunk(self) -> None:
        started = self._now()
        active, device = self.scheduler.active, self.cache.shape.device
        steps = min(self.chunk, self.scheduler.remaining())
        tokens = torch.tensor([sequence.response[-1] for sequence in active], device=device)
        positions = torch.tensor([sequence.position for sequence in active], device=device)
        seeds = torch.tensor([sequence.request.seed for sequence in active], device=device)
        # A sequence that ends within the chunk idles to its end; its position must not pass what the model was made for.
        last = torch.tensor([len(s.request.prompt) + self.sampling.max_tokens - 1 for s in active], device=device)
        longest = max(sequence.held for sequence in active)
        even = longest == min(sequence.held for sequence in active)
        sampled, sampled_logprobs = [], []
        with decode_context(self.model):
            for step in range(steps):
                tokens, logprobs = decode_step(
                    self.model,
                    self.cache,
                    tokens,
                    torch.minimum(positions + step, last),
                    seeds,
                    self.sampling,
                    longest=longest + step + 1,
                    even=even,
                )
                sampled.append(tokens)
                sampled_logprobs.append(logprobs)
        token_rows = torch.stack(sampled, dim=1).tolist()
        logprob_rows = torch.stack(sampled_logprobs, dim=1).tolist()
        for sequence, row, logprob_row in zip(active, token_rows, logprob_rows, strict=True):
            dense = sequence.position
            taken = self._take(sequence, row, logprob_row)
            self.stats.count_steps(taken=taken, held=sequence.held, dense=dense)
            sequence.kv_peak = max(sequence.kv_peak, sequence.held + taken)
            sequence.held += steps
            sequence.entered += steps
        self.stats.dense_peak_tokens = max(self.stats.dense_peak_tokens, sum(sequence.position for sequence in active))
        self.stats.steps += steps
        self.stats.slot_steps += steps * self.cache.slots
        self.stats.decode_s += self._now() - started

    def _take(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> int:
        if not all(map(math.isfinite, logprobs)):
            raise UserError("The model's logits are not finite: its weights are broken; go back to a checkpoint that samples.")
        taken = sequence.take(tokens, logprobs, self.scheduler.stop, self.sampling.max_tokens)
        self.stats.tokens += taken
        self.new_tokens.setdefault(sequence.request.index, []).extend(tokens[:taken])
        return taken

    def _retire(self) -> None:
        finished, moves = self.scheduler.retire()
        for source, slot in moves:
            self.cache.copy_slot(self.cache, source, slot, self.scheduler.active[slot].held)
        for sequence in finished:
            assert sequence.finish is not None
            request, shape = sequence.request, self.cache.shape
            tokens = len(request.prompt) + len(sequence.response)
            self.rollouts[request.index] = Rollout(
                prompt=request.prompt,
                response=sequence.response,
                logprobs=torch.tensor(sequence.logprobs, dtype=torch.float32),
                finish=sequence.finish,
                kv_peak=sequence.kv_peak,
                temperature=self.sampling.logprob_temperature,
                seed=request.seed,
                trace=sequence.trace.finish(shape.layers, shape.kv_heads, tokens) if self.record else None,
            )
            self.new_ends.append(request.index)
        self.finished += len(finished)

    # The bound

    def _compact(self) -> None:
        """Whoever has had a multiple of `interval` tokens enter and holds more than the budget goes back to it."""
        if not self.policy.evicts:
            return
        started = self._now()
        active = self.scheduler.active
        full_intervals = [sequence.held if sequence.entered % self.kv.interval == 0 else 0 for sequence in active]
        for held, slots in due(full_intervals, self.kv.budget).items():
            ripe = [active[slot] for slot in slots]
            dropped_LnHN = self.cache.compact(
                slots,
                held,
                self.kv.budget,
                self.policy,
                ends=[sequence.position for sequence in ripe],
                seeds=[sequence.request.seed for sequence in ripe],
                protected=[len(sequence.request.prompt) for sequence in ripe] if self.kv.protect_prompt else None,
            )
            dropped_LnHN = dropped_LnHN.cpu() if self.record else dropped_LnHN
            for index, sequence in enumerate(ripe):
                sequence.held = self.kv.budget
                if self.record:
                    sequence.trace.record(sequence.entered, dropped_LnHN[:, index])
            self.stats.compactions += len(ripe)
        self.stats.compaction_s += self._now() - started

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    self.finished, len(self.rollouts), self.stats.tokens, self.stats.seconds, self.new_tokens, self.new_ends
                )
            )
        self.new_tokens, self.new_ends = {}, []

    def _now(self) -> float:
        if self.cache.shape.device.type == "cuda":
            torch.cuda.synchronize(self.cache.shape.device)
        return time.perf_counter()
