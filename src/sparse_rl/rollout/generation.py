"""One call of `generate`, top to bottom: admit, decode a chunk, retire the finished, compact who is due."""

# L layers, H kv heads, N tokens dropped, V vocabulary

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError, notice
from ..kernels.counter_rng import uniform
from ..kernels.linear import decode_context
from ..kv.cache import SlotCache, due
from ..kv.policies import Policy
from ..kv.settings import KV
from ..kv.trace import TraceRecorder
from .clock import Clock
from .decode import decode_step
from .graph import Chunk, DecodeGraphs, NotCapturable
from .guard import RepetitionGuard
from .prefill import PromptInSlots, prefill
from .rollout import Rollout
from .sampling import sample
from .scheduler import Request, Scheduler, Sequence
from .settings import Sampling
from .stats import Progress, Stats

FIRST_TOKENS = 64
"""Rows of logits sampled at a time after prefill, with torch's float64 sums: a bound on what they take."""


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
        graphs: DecodeGraphs | None = None,
    ):
        self.model, self.cache, self.policy, self.kv, self.sampling = model, cache, policy, kv, sampling
        self.chunk, self.prefill_tokens, self.record, self.progress = chunk, prefill_tokens, record, progress
        self.graphs, self.stop = graphs, np.array(sorted(stop))
        self.scheduler = Scheduler(requests, cache.slots)
        self.clock = Clock(cache.shape.device)
        self.stats = Stats(peak_kv_bytes=cache.kv_bytes, side_bytes=cache.side_bytes)
        self.rollouts: list[Rollout | None] = [None] * len(requests)
        self.finished = 0
        self.stash: Stash | None = None
        self.unsettled: list[tuple[list[tuple[Sequence, int]], Tensor]] = []
        self.new_tokens: dict[int, list[np.ndarray]] = {}
        self.new_ends: list[int] = []

    def run(self) -> list[Rollout]:
        while self.scheduler.busy:
            while groups := self.scheduler.admit(self.prefill_tokens):
                with self.clock.part("prefill"):
                    self._prefill(groups)
            self._retire()
            if self.scheduler.active:
                self._decode_chunk()
                self._retire()
                with self.clock.part("compaction"):
                    self._compact()
            self._report()
        self._count_time()
        assert all(rollout is not None for rollout in self.rollouts)
        return self.rollouts  # type: ignore[return-value]

    # Prompts

    def _prefill(self, groups: list[list[Request]]) -> None:
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
        drawn = [
            sample(logits, numbers, self.sampling)
            for logits, numbers in zip(
                logits_nV.split(FIRST_TOKENS), uniform(seeds, positions).split(FIRST_TOKENS), strict=True
            )
        ]
        tokens, logprobs = (torch.cat(each) for each in zip(*drawn, strict=True))
        token_rows, logprob_rows, stops = self._to_host(tokens[:, None].cpu(), logprobs[:, None].cpu())
        for request, row, logprob_row, stop_at, gone in zip(requests, token_rows, logprob_rows, stops, dropped, strict=True):
            held = self._held_after_prefill(request.prompt)
            sequence = Sequence(request, held, TraceRecorder(len(request.prompt), self.kv.interval), kv_peak=held)
            if self.sampling.repetition is not None:
                sequence.guard = RepetitionGuard(*self.sampling.repetition)
            if gone is not None:
                self.stats.compactions += 1
                if self.record:
                    sequence.trace.record(0, gone[:, None].cpu())
            self._take(sequence, row, logprob_row, stop_at)
            self.scheduler.active.append(sequence)

    # Responses

    def _decode_chunk(self) -> None:
        active = self.scheduler.active
        steps = min(self.chunk, self.scheduler.remaining())
        chunk = Chunk(
            tokens=[sequence.last_token for sequence in active],
            positions=[sequence.position for sequence in active],
            lengths=[sequence.held for sequence in active],
            seeds=[sequence.request.seed for sequence in active],
            last=[sequence.last_position for sequence in active],
        )
        sampled = self._graph_steps(chunk, steps) if self.graphs else self._step_by_step(chunk, steps)
        self._settle()
        taken = []
        for sequence, row, logprob_row, stop_at in zip(active, *self._to_host(*sampled), strict=True):
            taken.append(self._take(sequence, row, logprob_row, stop_at))
            sequence.kv_peak = max(sequence.kv_peak, sequence.held + taken[-1])
            sequence.held += steps
            sequence.entered += steps
        self.stats.count_steps(np.array(taken), np.array(chunk.lengths), np.array(chunk.positions))
        self.stats.dense_peak_tokens = max(self.stats.dense_peak_tokens, sum(chunk.positions) + steps * len(active))
        self.stats.steps += steps
        self.stats.slot_steps += steps * self.cache.slots

    def _graph_steps(self, chunk: Chunk, steps: int) -> tuple[Tensor, Tensor]:
        assert self.graphs is not None
        try:
            return self.graphs.run(chunk, steps, self.sampling, self.clock)
        except NotCapturable as error:
            notice(f"The decode step of this model cannot be a CUDA graph ({error}): it runs step by step, and slower.")
            self.graphs = None
            return self._step_by_step(chunk, steps)

    def _step_by_step(self, chunk: Chunk, steps: int) -> tuple[Tensor, Tensor]:
        """Where the step is no graph: tokens and log-probs [S, steps]."""
        with self.clock.part("decode"):
            return self._steps(chunk, steps)

    def _steps(self, chunk: Chunk, steps: int) -> tuple[Tensor, Tensor]:
        device = self.cache.shape.device
        self.cache.lengths_S[: len(chunk.lengths)] = torch.tensor(chunk.lengths, device=device)
        tokens, positions, seeds, last = (
            torch.tensor(each, device=device) for each in (chunk.tokens, chunk.positions, chunk.seeds, chunk.last)
        )
        longest = max(chunk.lengths)
        even = longest == min(chunk.lengths)
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
        return torch.stack(sampled, dim=1).cpu(), torch.stack(sampled_logprobs, dim=1).cpu()

    def _to_host(self, tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Rows of tokens and log-probs, and where in each row the first stop token is (the row's length if nowhere)."""
        if not bool(logprobs.isfinite().all()):
            raise UserError("The model's logits are not finite: its weights are broken; go back to a checkpoint that samples.")
        stops = np.isin(tokens.numpy(), self.stop)
        first = np.where(stops.any(axis=1), stops.argmax(axis=1), stops.shape[1])
        return tokens.numpy(), logprobs.float().numpy(), first.tolist()

    def _take(self, sequence: Sequence, tokens: np.ndarray, logprobs: np.ndarray, stop_at: int) -> int:
        taken = sequence.take(tokens, logprobs, stop_at)
        self.stats.tokens += taken
        if self.progress is not None:
            self.new_tokens.setdefault(sequence.request.index, []).append(tokens[:taken])
        return taken

    def _retire(self) -> None:
        finished, moves = self.scheduler.retire()
        for source, slot in moves:
            self.cache.copy_slot(self.cache, source, slot, self.scheduler.active[slot].held)
        for sequence in finished:
            assert sequence.finish is not None
            request, shape = sequence.request, self.cache.shape
            response, logprobs = sequence.response()
            tokens = len(request.prompt) + len(response)
            self.rollouts[request.index] = Rollout(
                prompt=request.prompt,
                response=response,
                logprobs=torch.from_numpy(logprobs),
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
            for sequence in ripe:
                sequence.held = self.kv.budget
            if self.record:
                furthest = max(sequence.position for sequence in ripe)
                dropped_LnHN = dropped_LnHN.short() if furthest <= torch.iinfo(torch.int16).max else dropped_LnHN
                self.unsettled.append(([(sequence, sequence.entered) for sequence in ripe], to_host_later(dropped_LnHN)))
            self.stats.compactions += len(ripe)

    def _settle(self) -> None:
        """Write down what the last compactions dropped, now that the device has been waited for."""
        for sequences, pinned_LnHN in self.unsettled:
            dropped_LnHN = pinned_LnHN.clone()  # pinned memory goes back to be used again: it takes long to get
            for index, (sequence, entered) in enumerate(sequences):
                sequence.trace.record(entered, dropped_LnHN, index)
        self.unsettled.clear()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    self.finished, len(self.rollouts), self.stats.tokens, self.clock.wall_s, self.new_tokens, self.new_ends
                )
            )
        self.new_tokens, self.new_ends = {}, []

    def _count_time(self) -> None:
        parts = self.clock.seconds()
        self.stats.prefill_s, self.stats.decode_s, self.stats.compaction_s = (
            parts.get(part, 0.0) for part in ("prefill", "decode", "compaction")
        )
        self.stats.seconds = self.clock.wall_s


def to_host_later(tensor: Tensor) -> Tensor:
    """On its way to the host: complete when the device has been waited for, as it is at the end of every chunk."""
    return tensor.to("cpu", non_blocking=True)
