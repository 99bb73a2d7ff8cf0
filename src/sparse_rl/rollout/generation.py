"""One call of `generate`: admit requests, decode a chunk, retire finished sequences, and compact the slots that are due."""

# L layers, H kv heads, N tokens dropped, V vocabulary, S slots, n steps, R routers, K experts per token

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import Sampling
from ..errors import UserError, notice
from ..kv.cache import SlotCache
from ..kv.policies import Policy
from ..kv.prompt_store import PagePool
from ..kv.schedule import Schedule, by_length
from ..kv.storage import Quantiser
from ..kv.trace import TraceRecorder
from ..models.compile import fused_layers
from ..models.routing import Routers
from .clock import Clock
from .decode import SlotState
from .drops import PendingDrops
from .long_prefill import prefill_long
from .paged import PagedSlots, move_slots
from .prefill import Prefilled, PromptInSlots, Stash, prefill
from .repetition import RepetitionGuard, first_repetitions
from .request import Request, first_tokens
from .rollout import Rollout
from .runner import EagerRunner, GraphRunner, NotCapturable, StepRunner
from .scheduler import Scheduler, Sequence, dense_tokens_held
from .stats import Progress, Stats

ROUND = 2
"""Number of chunks between refills of finished slots, if chunks are launched ahead. Sequences that start together are compacted
together, and the device waits for the host less often."""
REFILL = 16
"""Number of new sequences that enter 256 slots together on a GPU. Even a small prefill takes as long as ten decode steps."""


class Generation:
    """State of one `generate` call: requests, sequences, slots and statistics."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SlotCache,
        policy: Policy,
        schedule: Schedule,
        sampling: Sampling,
        requests: list[Request],
        *,
        stop: frozenset[int],
        chunk: int,
        prefill_tokens: int,
        progress: Callable[[Progress], None] | None,
        on_end: Callable[[int, Rollout], None] | None = None,
        more: Callable[[], list[Request]] | None = None,
        graphs: GraphRunner | None = None,
        quantiser: Quantiser | None = None,
        routers: Routers | None = None,
    ):
        self.model, self.cache, self.policy = model, cache, policy
        self.schedule, self.sampling = schedule, sampling
        self.chunk, self.prefill_tokens = chunk, prefill_tokens
        self.progress, self.on_end, self.quantiser, self.routers = progress, on_end, quantiser, routers
        self.runner: StepRunner = graphs or EagerRunner(model, cache)
        self.stop = np.array(sorted(stop))
        refill = max(1, REFILL * cache.slots // 256) if self.runner.overlaps else 1
        self.pages = None
        if cache.prompts is not None:
            self.pages = PagePool(cache.prompts.pages, responses=schedule.pages_responses)
        self.scheduler = Scheduler(requests if more is None else [], cache.slots, refill, more, self.pages)
        self.clock = Clock(cache.shape.device)
        self.stats = Stats(peak_kv_bytes=cache.kv_bytes, side_bytes=cache.side_bytes)
        self.paged: PagedSlots | None = None
        if schedule.pages_responses:
            self.paged = PagedSlots(model, cache, policy, schedule, self.scheduler, self.stats, prefill_tokens)
        self.rollouts: list[Rollout | None] = [None] * len(requests)
        self.finished = 0
        self.steps_together = 0
        """Decode steps since all slots were last empty. Chunks end at multiples of the interval in this count."""
        self.stash: Stash | None = None
        self.sampled_ahead: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """First token and its log-prob of samples that still wait for a slot, by request index."""
        self.started = 0
        """Number of sequences that have started."""
        self.drops = PendingDrops()
        self.prompt_choices: dict[int, Tensor | None] = {}  # experts chosen for the tokens of each prompt, by group
        self.new_tokens: dict[int, list[np.ndarray]] = {}
        self.new_ends: list[int] = []
        self.aborted: set[int] = set()

    def run(self) -> list[Rollout]:
        """Run all requests. Return their rollouts in the order of the requests."""
        while self.scheduler.has_work():
            if not self.scheduler.active:
                self.steps_together = 0
            if self.scheduler.should_prefill():
                while groups := self.scheduler.admit(self.prefill_tokens):
                    with self.clock.part("prefill"):
                        self._prefill(groups)
            self._retire()
            if any(sequence.finish is None for sequence in self.scheduler.active):  # a callback may have aborted all
                self._decode()
                self._retire()
                with self.clock.part("compaction"):
                    self._compact()
            self._report()
        self._count_time()
        if self.pages is not None:
            self.stats.count_pages(self.pages, 0)
        if not self.cache.layers:  # every layer has a window, and the statistics leave out windows
            self.stats.compactions, self.stats.kept_tokens = 0, self.stats.dense_tokens
        assert self.finished == self.scheduler.total
        return [rollout for rollout in self.rollouts if rollout is not None]

    # Prompts

    def _prefill(self, groups: list[list[Request]]) -> None:
        if self.paged is not None:
            self._prefill_pages(groups, self.paged)
            return
        requests = [request for group in groups for request in group]
        slot = len(self.scheduler.active)
        prompts: list[PromptInSlots] = []
        pages_of_slots: dict[int, list[int]] = {}
        logits: list[Tensor] = []
        dropped: list[Tensor | None] = []
        for group in groups:
            slots = list(range(slot, slot + len(group)))
            slot += len(group)
            pages = [] if self.pages is None else self.pages.of_group[group[0].group]
            pages_of_slots |= dict.fromkeys(slots, pages)
            if self.stash is not None and self.stash.group == group[0].group:
                for each in slots:
                    self.cache.copy_slot(self.stash.cache, 0, each, self.stash.held)
                logits += [self.stash.logits_V] * len(group)
                dropped += [self.stash.dropped_LHN] * len(group)
            else:
                prompts.append(PromptInSlots.of(group, slots, pages))
        if self.cache.prompts is not None:
            self.cache.prompts.assign(pages_of_slots)
        self.stash = None if prompts else self.stash
        if prompts:
            first_logits, dropped_of, _ = self._run_prefill(prompts)
            for prompt, logits_V, dropped_of_prompt in zip(prompts, first_logits, dropped_of, strict=True):
                logits += [logits_V] * len(prompt.slots)
                dropped += dropped_of_prompt
            self._stash_prompt(groups[-1][0].group, prompts[-1], first_logits[-1], dropped_of[-1][0])
        sequences = self._new_sequences(requests, dropped)
        self._append_tokens(sequences, *first_tokens(requests, torch.stack(logits), self.sampling))
        self._end_aborted(sequences)
        self.scheduler.active += sequences

    def _run_prefill(self, prompts: list[PromptInSlots]) -> Prefilled:
        """Fill slots or pages with prompts."""
        with fused_layers(self.model):
            inputs = (self.model, self.cache, self.policy, self.schedule)
            if self._is_long(prompts):
                found = prefill_long(*inputs, prompts[0], self.prefill_tokens, 0, self.routers)
            else:
                found = prefill(*inputs, prompts, self.routers)
        self._count_prefill(prompts)
        self.prompt_choices |= zip([prompt.group for prompt in prompts], found.choices, strict=True)
        return found

    def _prefill_pages(self, groups: list[list[Request]], paged: PagedSlots) -> None:
        """Fill pages with the prompts that are not stored yet, and start or resume a dense sequence for each request.

        First tokens are sampled for all samples of a group, including those that still wait for a slot.
        """
        assert self.pages is not None
        requests = [request for group in groups for request in group]
        slots = {request.index: slot for slot, request in enumerate(requests, len(self.scheduler.active))}
        self._fill_pages([group for group in groups if self._needs_prefill(group)], slots)
        fresh = [request for request in requests if request.index not in self.scheduler.paused]
        sequences = {each.request.index: each for each in self._new_sequences(fresh, [None] * len(fresh))}
        if fresh:
            firsts = zip(*(self.sampled_ahead.pop(request.index) for request in fresh), strict=True)
            self._append_tokens(list(sequences.values()), *map(np.stack, firsts))
        for request in requests:
            if request.index in self.scheduler.paused:
                sequences[request.index] = self.scheduler.paused.pop(request.index)
        self._end_aborted(list(sequences.values()))
        paged.place({slot: sequences[index] for index, slot in slots.items()})
        self.scheduler.return_last_pages(groups)
        self.scheduler.active += [sequences[index] for index in slots]

    def _needs_prefill(self, group: list[Request]) -> bool:
        """Return whether the pages of a group lack its prompt. The windows and states of a new sequence always need a prefill."""
        assert self.pages is not None
        starts = any(request.index not in self.scheduler.paused for request in group)
        return group[0].group not in self.pages.prefilled or (self.cache.has_windows_or_states and starts)

    def _fill_pages(self, groups: list[list[Request]], slots: dict[int, int]) -> None:
        """Fill pages with the prompts of these groups, and sample the first tokens of all their samples."""
        if not groups:
            return
        assert self.pages is not None
        prompts, requests, rows = [], [], []
        for row, group in enumerate(groups):
            pages = self.pages.of_group[group[0].group]
            prompts.append(PromptInSlots.of(group, [slots[request.index] for request in group], pages))
            samples = [*group, *self.scheduler.waiting_of(group[0].group)]
            requests += samples
            rows += [row] * len(samples)
        logits_nV, *_ = self._run_prefill(prompts)
        self.pages.prefilled.update(group[0].group for group in groups)
        logits_nV = logits_nV[torch.tensor(rows, device=logits_nV.device)]
        tokens, logprobs = first_tokens(requests, logits_nV, self.sampling)
        self.sampled_ahead |= {each.index: (tokens[row], logprobs[row]) for row, each in enumerate(requests)}

    def _is_long(self, prompts: list[PromptInSlots]) -> bool:
        """Return whether the prompt exceeds one forward pass. The scheduler admits such a prompt alone."""
        return len(prompts[0].prompt) > self.prefill_tokens

    def _count_prefill(self, prompts: list[PromptInSlots]) -> None:
        tokens = sum(len(prompt.prompt) for prompt in prompts)
        layers = self.cache.shape.layers
        self.stats.prompt_tokens += tokens
        in_scratch = min(tokens, self.prefill_tokens)  # tokens times layers
        if self._is_long(prompts):
            in_scratch += tokens * self.schedule.scratch_layers(tokens, layers)
        self.stats.scratch_bytes = max(self.stats.scratch_bytes, in_scratch * self.cache.layer_token_bytes)

    def _stash_prompt(self, group: int, prompt: PromptInSlots, logits_V: Tensor, dropped_LHN: Tensor | None) -> None:
        """Copy the prompt's slot if samples of the prompt still wait, unless each sample evicts different keys."""
        waiting = self.scheduler.waiting
        if not waiting or waiting[0].group != group or (dropped_LHN is not None and self.policy.uses_seeds):
            return
        held = self.schedule.held_after_prefill(len(prompt.prompt))
        cache = self.cache.empty_like(1, held)
        cache.copy_slot(self.cache, prompt.slots[0], 0, held)
        self.stash = Stash(group, cache, held, logits_V, dropped_LHN)
        self.stats.scratch_bytes = max(self.stats.scratch_bytes, cache.kv_bytes)

    def _new_sequences(self, requests: list[Request], dropped: list[Tensor | None]) -> list[Sequence]:
        """Return a new sequence for each request. The prompts have just entered the cache."""
        sequences = []
        for request, dropped_LHN in zip(requests, dropped, strict=True):
            held = self.schedule.held_after_prefill(len(request.prompt))
            stored = len(request.prompt) - held if self.schedule.stores_prompts else 0
            trace = TraceRecorder(len(request.prompt), self.schedule.interval) if request.record else None
            sequence = Sequence(request, held, trace, stored, kv_peak=stored + held, number=self.started)
            sequence.prompt_choices_TRK = self.prompt_choices[request.group]
            self.started += 1
            if self.sampling.repetition is not None:
                sequence.repetition = RepetitionGuard(*self.sampling.repetition)
            if dropped_LHN is not None:
                self.stats.compactions += 1
                if sequence.trace is not None:
                    sequence.trace.record(0, dropped_LHN[:, None].cpu())
            sequences.append(sequence)
        return sequences

    # Responses

    def _decode(self) -> None:
        """Run chunks of steps until the slots change. On a GPU, the host processes one chunk while the next one runs."""
        if self.paged is not None:
            with self.clock.part("compaction"):
                self.paged.make_room(self.chunk)
        self._start_steps()
        steps = min(self.schedule.steps_to_boundary(self.steps_together, self.chunk), self.scheduler.remaining())
        pending = self.runner.launch(steps, self.clock)
        while True:
            next_steps = self.schedule.steps_to_boundary(self.steps_together + steps, self.chunk)
            next_steps = min(next_steps, self.scheduler.remaining() - steps)
            ahead = self._may_launch_ahead(steps, next_steps)
            next_pending = self.runner.launch(next_steps, self.clock) if ahead else None
            self._postprocess(steps, *pending.wait())
            if next_pending is None:
                return
            pending, steps = next_pending, next_steps

    def _start_steps(self) -> None:
        active = self.scheduler.active
        slots = SlotState(
            tokens=[sequence.last_token for sequence in active],
            positions=[sequence.position for sequence in active],
            lengths=[sequence.held for sequence in active],
            prompts=[sequence.stored for sequence in active],
            seeds=[sequence.request.seed for sequence in active],
            last_positions=[sequence.last_position for sequence in active],
        )
        try:
            self.runner.start(slots, self.sampling, self.routers)
        except NotCapturable as error:
            notice(
                f"The decode step of this model cannot be captured in a CUDA graph ({error}): decoding runs eagerly and is "
                "slower."
            )
            self.runner = EagerRunner(self.model, self.cache)
            self.runner.start(slots, self.sampling, self.routers)

    def _may_launch_ahead(self, steps: int, next_steps: int) -> bool:
        """Return whether `next_steps` may be launched before the result of the last `steps` is known.

        No slot may overflow or be due for compaction before they run. At the end of a round, too few slots must have ended
        for a refill.
        """
        active = self.scheduler.active
        if not self.runner.overlaps or next_steps < 1:
            return False
        if max(sequence.held for sequence in active) + steps + next_steps > self.cache.capacity:
            return False
        if any(self.schedule.is_due(sequence.entered + steps, sequence.held + steps) for sequence in active):
            return False
        if self.schedule.steps_into_interval(self.steps_together + steps) % (ROUND * self.chunk):
            return True
        if self.scheduler.has_more:
            return not self.scheduler.should_prefill()
        return 2 * sum(sequence.finish is not None for sequence in active) < len(active)

    def _postprocess(
        self, steps: int, tokens_Sn: np.ndarray, logprobs_Sn: np.ndarray, choices_SnRK: np.ndarray | None
    ) -> None:
        """Append the sampled tokens to their sequences and update the statistics."""
        self.drops.record()
        active = self.scheduler.active
        cached, dense = (np.array(each) for each in zip(*((each.cached, each.position) for each in active), strict=True))
        running = np.array([sequence.finish is None for sequence in active])  # the others ended in the last chunk and idled
        taken = self._append_tokens(active, tokens_Sn, logprobs_Sn)
        for slot, (sequence, runs, tokens) in enumerate(zip(active, running, taken, strict=True)):
            if choices_SnRK is not None:
                sequence.choices.append(choices_SnRK[slot, :tokens].copy())  # a view would keep the choices of all slots
            sequence.kv_peak = max(sequence.kv_peak, sequence.cached + tokens) if runs else sequence.kv_peak
            sequence.held += steps
            sequence.entered += steps
        self.stats.count_steps(np.array(taken), cached, dense)
        if self.pages is not None:
            self.stats.count_pages(self.pages, steps)
        dense_now = dense_tokens_held([sequence for sequence, runs in zip(active, running, strict=True) if runs])
        self.stats.dense_peak_tokens = max(self.stats.dense_peak_tokens, dense_now)
        self.steps_together += steps
        self.stats.steps += steps
        self.stats.slot_steps += steps * self.cache.slots
        self._report()

    def _append_tokens(self, sequences: list[Sequence], tokens_Sn: np.ndarray, logprobs_Sn: np.ndarray) -> list[int]:
        """Append sampled tokens to the sequences that still run. Return how many each took."""
        running = np.array([sequence.finish is None for sequence in sequences])
        if not np.isfinite(logprobs_Sn[running]).all():
            raise UserError("The model's logits are not finite, so its weights are broken: use an earlier checkpoint.")
        stops_Sn = np.isin(tokens_Sn, self.stop)
        stop_at_S = np.where(stops_Sn.any(axis=1), stops_Sn.argmax(axis=1), stops_Sn.shape[1]).tolist()
        repeats_at_S = [tokens_Sn.shape[1]] * len(sequences)
        if self.sampling.repetition is not None:
            guards = [sequence.repetition for sequence in sequences if sequence.repetition is not None]
            repeats_at_S = first_repetitions(guards, tokens_Sn).tolist()
        taken = []
        for sequence, tokens, logprobs, stop_at, repeats_at in zip(
            sequences, tokens_Sn, logprobs_Sn, stop_at_S, repeats_at_S, strict=True
        ):
            taken.append(0 if sequence.finish else sequence.append(tokens, logprobs, stop_at, repeats_at))
            if self.progress is not None and taken[-1]:
                self.new_tokens.setdefault(sequence.request.index, []).append(tokens[: taken[-1]])
        self.stats.tokens += sum(taken)
        return taken

    def _retire(self) -> None:
        finished, moves = self.scheduler.retire()
        move_slots(self.cache, self.scheduler, moves)
        for sequence in finished:
            assert sequence.finish is not None
            request, shape = sequence.request, (self.cache.shape.layers, self.cache.shape.kv_heads)
            response, logprobs = sequence.response()
            tokens = len(request.prompt) + len(response)
            rollout = Rollout(
                prompt=request.prompt,
                response=response,
                logprobs=torch.from_numpy(logprobs),
                finish=sequence.finish,
                kv_peak=sequence.kv_peak,
                temperature=self.sampling.logprob_temperature,
                seed=request.seed,
                trace=None if sequence.trace is None else sequence.trace.finish(*shape, tokens, self.cache.absent),
                quantiser=self.quantiser,
                routing=sequence.routing(),
            )
            self.rollouts[request.index] = rollout
            self.new_ends.append(request.index)
            if self.on_end is not None:
                self.on_end(request.index, rollout)
        self.finished += len(finished)

    # Compaction

    def _compact(self) -> None:
        """Compact the sequences that are due for compaction."""
        active = self.scheduler.active
        # a policy that does not compare keys reads no stored prompt: slots with prompts of any length are compacted together
        most = None if self.policy.compares_keys else self.policy.sinks
        due = [
            (slot, each.stored if most is None else min(each.stored, most), each.held)
            for slot, each in enumerate(active)
            if self.schedule.is_due(each.entered, each.held)
        ]
        for (stored, held), slots in by_length(due).items():
            sequences = [active[slot] for slot in slots]
            dropped_LnHN = self.cache.compact(
                slots,
                held,
                self.schedule.budget,
                self.policy,
                ends=[sequence.position for sequence in sequences],
                seeds=[sequence.request.seed for sequence in sequences],
                protected=stored,
            )
            for sequence in sequences:
                sequence.held = self.schedule.budget
            self.drops.add(sequences, dropped_LnHN)
            self.stats.compactions += len(sequences)

    def _report(self) -> None:
        if self.progress is not None:
            counts = (self.finished, self.scheduler.total, self.stats.tokens, self.clock.wall_s)
            self.progress(Progress(*counts, self.new_tokens, self.new_ends, self._abort))
        self.new_tokens, self.new_ends = {}, []

    def _abort(self, index: int) -> None:
        """End a rollout. Steps that are already launched for it are ignored, as after a stop token."""
        self.aborted.add(index)
        self._end_aborted(self.scheduler.active)

    def _end_aborted(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish is None and sequence.request.index in self.aborted:
                sequence.finish = "abort"

    def _count_time(self) -> None:
        parts = self.clock.seconds()
        self.stats.prefill_s, self.stats.decode_s, self.stats.compaction_s = (
            parts.get(part, 0.0) for part in ("prefill", "decode", "compaction")
        )
        self.stats.seconds = self.clock.wall_s
