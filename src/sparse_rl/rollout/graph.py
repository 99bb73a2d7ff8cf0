"""The decode step as one CUDA graph: captured once for a number of slots, replayed for every token.

Tokens, positions, lengths and seeds live on the device, and the step moves them on by itself, so the host is asked nothing
inside a chunk. Weights are read where they lie: an update in place is seen by the next replay.
"""

# S slots, n steps of a chunk, V vocabulary

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import Sampling
from ..errors import first_line, notice
from ..kernels.draw import draw_and_advance
from ..kernels.jit import next_power_of_2, usable, why_not
from ..kernels.nucleus import Truncation
from ..kv.cache import SlotCache
from ..models.attention import run
from ..models.decoding import decoding, fuse_projections
from .clock import Clock
from .decode import DecodeView, SlotState

SMALLEST = 16
"""Slots below which a smaller graph would not be faster."""


class NotCapturable(RuntimeError):
    """The model asks the host something in the middle of a step: it cannot be a graph."""


@dataclass(frozen=True)
class InFlight:
    """Steps that were launched: their tokens and log-probs, on their way to the host."""

    done: torch.cuda.Event
    tokens_nS: Tensor
    logprobs_nS: Tensor

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probs [S, n]."""
        self.done.synchronize()
        return self.tokens_nS.t().numpy().copy(), self.logprobs_nS.t().numpy().copy()


class DecodeGraphs:
    """The captured steps of one model over one cache."""

    overlaps = True
    """A launch returns at once, so that the next one can follow while the host looks at the result of this one."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, chunk: int, *, compile: bool):
        device = cache.shape.device
        self.model, self.cache, self.compile = model, cache, compile
        if compile:
            fuse_projections(model)
            torch.cuda.empty_cache()  # the places the weights were in fit nothing that comes
        self.state = torch.zeros(6, cache.slots, dtype=torch.int64, device=device)
        self.host = torch.zeros(6, cache.slots, dtype=torch.int64).pin_memory()
        self.temperature_1 = torch.ones(1, device=device)
        self.truncation = Truncation(
            torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.float64, device=device)
        )
        self.chunk, self.turn, self.active = chunk, 0, 0
        # Two chunks take turns: one is fetched while the next one runs.
        self.sampled_nS = torch.zeros(2 * chunk, cache.slots, dtype=torch.int64, device=device)
        self.logprobs_nS = torch.zeros(2 * chunk, cache.slots, device=device)
        self.host_sampled_nS, self.host_logprobs_nS = (
            torch.zeros_like(each, device="cpu").pin_memory() for each in (self.sampled_nS, self.logprobs_nS)
        )
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.weights = self._weights()

    def fits(self, model: PreTrainedModel, cache: SlotCache, chunk: int) -> bool:
        """Whether these graphs still read the right memory."""
        same = self.model is model and self.cache is cache and self.chunk == chunk
        return same and self.weights == self._weights()

    def start(self, slots: SlotState, sampling: Sampling) -> None:
        """Upload the active slots and make their step ready."""
        self.active = len(slots.tokens)
        bucket = min(self.cache.slots, max(SMALLEST, next_power_of_2(self.active)))
        self.temperature_1.fill_(sampling.logprob_temperature)
        self.truncation.top_k_1.fill_(sampling.top_k)
        self.truncation.top_p_1.fill_(sampling.top_p)
        host = self.host.numpy()
        host.fill(0)
        for row, values in enumerate((slots.tokens, slots.positions, slots.lengths, slots.seeds, slots.last)):
            host[row, : self.active] = values
        key = (bucket, sampling.temperature == 0, truncates(sampling))
        if key not in self.graphs:
            try:
                self.graphs[key] = self._capture(bucket, sampling)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise NotCapturable(first_line(error)) from error
        self._upload()
        self.graph = self.graphs[key]

    def launch(self, steps: int, clock: Clock) -> "InFlight":
        """Enqueue that many steps. One more launch may follow before this one's result is fetched."""
        self.turn = 1 - self.turn
        first = self.turn * self.chunk
        self.state[5].fill_(first)
        with clock.part("decode"):
            for _ in range(steps):
                self.graph.replay()
        rows = slice(first, first + steps)
        into = (self.host_sampled_nS[rows], self.host_logprobs_nS[rows])
        for host, device in zip(into, (self.sampled_nS[rows], self.logprobs_nS[rows]), strict=True):
            host.copy_(device, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.cache.shape.device))
        return InFlight(done, *(host[:, : self.active] for host in into))

    def _upload(self) -> None:
        self.state.copy_(self.host, non_blocking=True)

    def _capture(self, slots: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """A step is run twice before, which compiles what it needs; each run starts from the uploaded state, so what
        they write is written again by the first real step."""
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
                notice(f"The decode step could not be compiled ({first_line(error)}): it runs uncompiled, and slower.")
                self.compile = False
        with torch.cuda.stream(self.stream), decoding(self.model, compile=self.compile):
            self._warm_up(slots, sampling)
            self.stream.synchronize()
            with warnings.catch_warnings():  # a capture that runs out of memory: its error says more
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    self._step(slots, sampling)
        torch.cuda.current_stream(device).wait_stream(self.stream)
        return graph

    def _warm_up(self, slots: int, sampling: Sampling) -> None:
        self._upload()
        self._step(slots, sampling)

    def _step(self, slots: int, sampling: Sampling) -> None:
        tokens_S, positions_S, lengths_S, seeds_S, last_S, steps_S = (row[:slots] for row in self.state)
        view = DecodeView(self.cache, positions_S, lengths_S)
        logits_SV = run(self.model, tokens_S[:, None], positions_S[:, None], view, keep=1)[:, -1]
        state = (tokens_S, positions_S, lengths_S, steps_S, seeds_S, last_S)
        chunk = (self.sampled_nS[:, :slots], self.logprobs_nS[:, :slots])
        truncation = self.truncation if truncates(sampling) else None
        greedy = sampling.temperature == 0
        draw_and_advance(logits_SV, *state, self.temperature_1, *chunk, greedy=greedy, truncation=truncation)

    def _weights(self) -> list[int]:
        return [weight.data_ptr() for weight in (*self.model.parameters(), *self.model.buffers())]


def truncates(sampling: Sampling) -> bool:
    """A greedy draw has nothing to truncate."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def graphs_work_on(device: torch.device) -> bool:
    """Whether the decode step can be a graph there; says so in one line where a GPU lacks what it takes."""
    if device.type != "cuda":
        return False
    if not usable(device):
        notice(f"Without Triton on this GPU decoding runs step by step, and slower ({why_not(device)}).")
        return False
    return True
