"""Run decode steps: an eager runner for any device and a graph runner for CUDA, with one protocol.

The graph runner captures one step per slot count and replays it for every token. Tokens, positions, lengths and seeds are on
the device and advance with each step, so the host does no work within a chunk. Graphs read the weights in place, so an
in-place update takes effect at the next replay.
"""

# S slots, n steps of a chunk, V vocabulary, R routers, K experts per token, P pages of the longest prompt, A programs over stored
# prompts, M slots of a program

import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import KV, Sampling
from ..errors import first_line, notice
from ..kernels.counter_rng import uniform
from ..kernels.draw import draw_and_advance
from ..kernels.jit import next_power_of_2, usable, why_not
from ..kernels.linear import decode_context
from ..kernels.nucleus import Truncation
from ..kernels.prompt_readers import members_of, programs_of, prompt_readers
from ..kv.cache import SlotCache
from ..models.compile import decoding, fuse_projections
from ..models.routing import RecordedRouting, Routers
from ..models.support import next_logits
from .clock import Clock
from .decode import DecodeView, SlotState
from .sampling import sample

SMALLEST = 16
"""Smallest slot count of a graph. A graph with fewer slots would not be faster."""
SIZES = 8
"""Number of evenly spaced graph sizes up to all slots. Smaller graphs have power-of-two sizes."""
STATE = ("tokens", "positions", "lengths", "seeds", "last_positions", "prompts", "steps")
"""Rows of the state that graphs read: fields of `SlotState`, then the row of the buffers that the next step writes."""


def graph_slots(active: int, slots: int) -> int:
    """Return the size of the smallest graph that holds the active slots."""
    spacing = max(SMALLEST, next_power_of_2(slots) // SIZES)
    size = -(-active // spacing) * spacing if active > spacing else max(SMALLEST, next_power_of_2(active))
    return min(size, slots)


class NotCapturable(RuntimeError):
    """Raised if a model synchronizes with the host within a step, so that the step cannot be captured as a CUDA graph."""


class LaunchedSteps(Protocol):
    """Handle of launched decode steps."""

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return tokens and log-probs [S, n], and the experts [S, n, R, K] chosen for the fed tokens, if they are recorded."""
        ...


class StepRunner(Protocol):
    """Run decode steps for the active slots."""

    overlaps: bool
    """True if `launch` returns immediately, so that the next launch can follow while the host reads this result."""

    def start(self, slots: SlotState, sampling: Sampling, routers: Routers | None = None) -> None:
        """Load the state of the active slots before the next launch. Steps record the choices of the `routers`, if given."""
        ...

    def launch(self, steps: int, clock: Clock) -> LaunchedSteps:
        """Start `steps` decode steps."""
        ...


class EagerRunner:
    """Run decode steps one by one in eager mode, on any device."""

    overlaps = False

    def __init__(self, model: PreTrainedModel, cache: SlotCache):
        self.model, self.cache = model, cache

    def start(self, slots: SlotState, sampling: Sampling, routers: Routers | None = None) -> None:
        device = self.cache.shape.device
        self.sampling, self.routers = sampling, routers
        self.tokens_S, self.positions_S, self.prompts_S, self.seeds_S, self.last_positions_S = (
            torch.tensor(each, device=device)
            for each in (slots.tokens, slots.positions, slots.prompts, slots.seeds, slots.last_positions)
        )
        self.longest = max(slots.lengths)
        self.even = self.longest == min(slots.lengths)
        self.cache.lengths_S[: len(slots.lengths)] = torch.tensor(slots.lengths, device=device)

    def launch(self, steps: int, clock: Clock) -> "FinishedSteps":
        """Run `steps` decode steps."""
        with clock.part("decode"), decode_context(self.model):
            results = [self._step() for _ in range(steps)]
        return FinishedSteps(*(torch.stack(each, dim=1).cpu() for each in zip(*results, strict=True)))

    def _step(self) -> tuple[Tensor, ...]:
        """Return the next token [S] of each active slot, its log-prob [S] and, if recorded, the chosen experts [S, R, K]."""
        self.longest += 1
        lengths_S = self.cache.lengths_S[: len(self.tokens_S)]
        view = DecodeView(
            *(self.cache, self.positions_S, lengths_S, self.prompts_S),
            longest=self.longest,
            even=self.even,
        )
        if self.routers is not None:
            view.routing = self.routers.recording(len(self.tokens_S), self.cache.shape.device)
        logits_SV = next_logits(self.model, self.tokens_S[:, None], self.positions_S[:, None], view, keep=1)[:, -1]
        view.advance()
        self.tokens_S, logprobs_S = sample(logits_SV, uniform(self.seeds_S, self.positions_S + 1), self.sampling)
        self.positions_S = torch.minimum(self.positions_S + 1, self.last_positions_S)
        return self.tokens_S, logprobs_S, *(() if view.routing is None else (view.routing.choices_NRK,))


@dataclass(frozen=True)
class FinishedSteps:
    """Results of finished steps."""

    tokens_Sn: Tensor
    logprobs_Sn: Tensor
    choices_SnRK: Tensor | None = None

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        choices = None if self.choices_SnRK is None else self.choices_SnRK.numpy()
        return self.tokens_Sn.numpy(), self.logprobs_Sn.float().numpy(), choices


@dataclass(frozen=True)
class PendingSteps:
    """Launched graph replays whose tokens, log-probs and expert choices are being copied to the host."""

    done: torch.cuda.Event
    tokens_nS: Tensor
    logprobs_nS: Tensor
    choices_nSRK: Tensor | None = None

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        self.done.synchronize()
        choices = None if self.choices_nSRK is None else self.choices_nSRK.transpose(0, 1).numpy().copy()
        return self.tokens_nS.t().numpy().copy(), self.logprobs_nS.t().numpy().copy(), choices


class GraphRunner:
    """Run decode steps as captured CUDA graphs, for one model and one cache."""

    overlaps = True

    def __init__(self, model: PreTrainedModel, cache: SlotCache, chunk: int, *, compile: bool):
        device = cache.shape.device
        self.model, self.cache, self.compile = model, cache, compile
        if compile:
            fuse_projections(model)
            torch.cuda.empty_cache()  # no later allocation fits the blocks that the weights freed
        self.stores = (cache.prompts, cache.windows)
        self.members = members_of(cache.shape.q_heads // cache.shape.kv_heads)
        self.reads_once = False
        self.readers_AM = torch.full((programs_of(cache.slots, self.members), self.members), -1, device=device)
        self.state = torch.zeros(len(STATE), cache.slots, dtype=torch.int64, device=device)
        self.host = torch.zeros(len(STATE), cache.slots, dtype=torch.int64).pin_memory()
        self.temperature_1 = torch.ones(1, device=device)
        self.truncation = Truncation(
            torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.float64, device=device)
        )
        self.chunk, self.turn, self.active = chunk, 0, 0
        # Two buffers alternate: one is copied to the host while the next chunk runs.
        self.sampled_nS = torch.zeros(2 * chunk, cache.slots, dtype=torch.int64, device=device)
        self.logprobs_nS = torch.zeros(2 * chunk, cache.slots, device=device)
        self.host_sampled_nS, self.host_logprobs_nS = (
            torch.zeros_like(each, device="cpu").pin_memory() for each in (self.sampled_nS, self.logprobs_nS)
        )
        self.routing: _GraphRouting | None = None
        self.records = False
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.weight_addresses = self._weight_addresses()

    def fits(self, model: PreTrainedModel, cache: SlotCache, chunk: int) -> bool:
        """Return whether the captured graphs still use the memory of this model's weights and this cache."""
        same = self.model is model and self.cache is cache and self.chunk == chunk
        same = same and all(mine is now for mine, now in zip(self.stores, (cache.prompts, cache.windows), strict=True))
        return same and self.weight_addresses == self._weight_addresses()

    def start(self, slots: SlotState, sampling: Sampling, routers: Routers | None = None) -> None:
        """Upload the state of the active slots, and capture the step if its slot count is new."""
        self.records = routers is not None
        if routers is not None and self.routing is None:
            self.routing = _GraphRouting(routers, 2 * self.chunk, self.cache.slots, self.cache.shape.device)
        self.active = len(slots.tokens)
        size = graph_slots(self.active, self.cache.slots)
        self.temperature_1.fill_(sampling.logprob_temperature)
        self.truncation.top_k_1.fill_(sampling.top_k)
        self.truncation.top_p_1.fill_(sampling.top_p)
        host = self.host.numpy()
        host.fill(0)
        for row, name in enumerate(STATE[:-1]):  # each launch sets the last row on the device
            host[row, : self.active] = getattr(slots, name)
        self._upload()
        self._assign_readers(size)  # before a capture, whose first steps run with them
        key = (size, sampling.temperature == 0, truncates(sampling), self.records, self.reads_once)
        if key not in self.graphs:
            try:
                self.graphs[key] = self._capture(size, sampling)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise NotCapturable(first_line(error)) from error
        self._upload()
        self.graph = self.graphs[key]

    def launch(self, steps: int, clock: Clock) -> "PendingSteps":
        """Enqueue `steps` decode steps. One more launch may follow before this result is fetched."""
        self.turn = 1 - self.turn
        first = self.turn * self.chunk
        self.state[STATE.index("steps")].fill_(first)
        with clock.part("decode"):
            for _ in range(steps):
                self.graph.replay()
        rows = slice(first, first + steps)
        copied = [(self.host_sampled_nS, self.sampled_nS), (self.host_logprobs_nS, self.logprobs_nS)]
        if self.records and self.routing is not None:
            copied.append((self.routing.host_nSRK, self.routing.choices_nSRK))
        for host, device in copied:
            host[rows].copy_(device[rows], non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.cache.shape.device))
        return PendingSteps(done, *(host[rows, : self.active] for host, _ in copied))

    def _assign_readers(self, slots: int) -> None:
        """Decide whether programs read a prompt once for several slots, and assign the slots to them."""
        prompts = self.cache.prompts
        self.reads_once = prompts is not None and prompts.reads_once
        if prompts is not None and self.reads_once:
            lengths_S = self.state[STATE.index("prompts"), :slots]
            readers_AM = prompt_readers(prompts.pages_SP[:slots], lengths_S, self.members)
            self.readers_AM[: len(readers_AM)] = readers_AM

    def _upload(self) -> None:
        self.state.copy_(self.host, non_blocking=True)

    def _capture(self, slots: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """Capture one step.

        The step first runs twice, which compiles its kernels. Each run starts from the uploaded state, so the first real step
        overwrites the keys and values of these runs. They leave recurrent states as they were.
        """
        device = self.cache.shape.device
        self.stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), decoding(self.model, compile=self.compile):
            try:
                self._warm_up(slots, sampling)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not self.compile:
                    raise
                notice(f"The decode step could not be compiled ({first_line(error)}): decoding runs uncompiled and is slower.")
                self.compile = False
        with torch.cuda.stream(self.stream), decoding(self.model, compile=self.compile):
            self._warm_up(slots, sampling)
            self.stream.synchronize()
            with warnings.catch_warnings():  # if a capture runs out of memory, the error is more informative than the warning
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    self._step(slots, sampling)
        torch.cuda.current_stream(device).wait_stream(self.stream)
        return graph

    def _warm_up(self, slots: int, sampling: Sampling) -> None:
        self._upload()
        self._step(slots, sampling, updates_states=False)

    def _step(self, slots: int, sampling: Sampling, *, updates_states: bool = True) -> None:
        state = {name: row[:slots] for name, row in zip(STATE, self.state, strict=True)}
        tokens_S, positions_S = state["tokens"], state["positions"]
        readers_AM = self.readers_AM[: programs_of(slots, self.members)] if self.reads_once else None
        view = DecodeView(
            self.cache, positions_S, state["lengths"], state["prompts"], readers_AM, updates_states=updates_states
        )
        if self.records and self.routing is not None:
            view.routing = RecordedRouting(self.routing.step_SRK[:slots])
        logits_SV = next_logits(self.model, tokens_S[:, None], positions_S[:, None], view, keep=1)[:, -1]
        if self.records and self.routing is not None:
            self.routing.store(state["steps"])
        inputs = (tokens_S, positions_S, state["lengths"], state["steps"], state["seeds"], state["last_positions"])
        chunk = (self.sampled_nS[:, :slots], self.logprobs_nS[:, :slots])
        truncation = self.truncation if truncates(sampling) else None
        greedy = sampling.temperature == 0
        draw_and_advance(logits_SV, *inputs, self.temperature_1, *chunk, greedy=greedy, truncation=truncation)

    def _weight_addresses(self) -> list[int]:
        """Return the addresses of all weights and buffers that graphs read."""
        buffers = [buffer for module in self.model.modules() for buffer in self._buffers(module)]
        return [weight.data_ptr() for weight in (*self.model.parameters(), *buffers)]

    def _buffers(self, module: torch.nn.Module) -> list[Tensor]:
        """Return the module's buffers that graphs read. A step computes those of longrope itself."""
        return [] if getattr(module, "rope_type", None) == "longrope" else list(module.buffers(recurse=False))


class _GraphRouting:
    """Fixed tensors that hold the expert choices of a step and of two chunks."""

    def __init__(self, routers: Routers, steps: int, slots: int, device: torch.device):
        shape = (slots, routers.count, routers.top_k)
        self.step_SRK = torch.zeros(shape, dtype=routers.dtype, device=device)
        self.choices_nSRK = torch.zeros(steps, *shape, dtype=routers.dtype, device=device)
        self.host_nSRK = torch.zeros_like(self.choices_nSRK, device="cpu")
        if device.type == "cuda":
            self.host_nSRK = self.host_nSRK.pin_memory()
        self.slots_S = torch.arange(slots, device=device)

    def store(self, steps_S: Tensor) -> None:
        """Copy the choices of a step to the row of the chunk that each slot is at."""
        slots = len(steps_S)
        self.choices_nSRK[steps_S, self.slots_S[:slots]] = self.step_SRK[:slots]


def truncates(sampling: Sampling) -> bool:
    """Return whether these settings truncate logits. Greedy sampling never does."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def graphs_work_on(device: torch.device, kv: KV) -> bool:
    """Return whether decode steps can be captured as CUDA graphs on this device. Print a notice for a GPU without Triton."""
    if device.type != "cuda":
        return False
    if not usable(device):
        codes = f" With kv.dtype = {kv.dtype}, each step also decodes all stored keys and values." if kv.quantised else ""
        notice(f"Triton is not available on this GPU ({why_not(device)}): decoding runs eagerly and is slower.{codes}")
        return False
    return True
