"""The engine: a model, a bounded KV cache and `generate`. This is the sampler's public API."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from ..config import KV, WORTH_COMPILING, Sampling
from ..errors import UserError, notice
from ..format import agreeing, counted
from ..kernels.jit import on
from ..kv.cache import SlotCache
from ..kv.policies import from_settings
from ..kv.prompt_store import PromptStore
from ..kv.schedule import Schedule
from ..kv.statistics import KEY_SCALES, Collector, KeyRanges, Statistics, key_scales
from ..kv.storage import KeyScales, Quantiser
from ..kv.windows import WindowStore
from ..models.attention import eval_mode
from ..models.rotary import rotary_of
from ..models.routing import install
from ..models.support import prepare
from ..sizes import (
    CHUNK_STEPS,
    DENSE_SLOT_TOKENS,
    PAGE_TOKENS,
    PREFILL_TOKENS,
    dense_pages,
    least_dense_pages,
    pool_pages,
    window_capacity,
)
from ..text import quoted
from ..world import ALONE, World
from .calibrate import ENOUGH_TOKENS, calibrate
from .generation import Generation
from .request import Request, RequestLimits
from .rollout import Rollout
from .runner import GraphRunner, graphs_work_on
from .selfcheck import check_model
from .stats import Progress, Stats


class Engine:
    """Sampler with a bounded KV cache: each slot holds at most budget + interval tokens per layer and head.

    The cache is allocated once. With `kv.protect_prompt`, prompts are in a prompt store, which holds each prompt once for all
    its samples and grows with the calls. A dense cache (`kv.policy = "full"`) is a pool of pages, which sequences take as they
    grow. `slots` sequences run concurrently; the others wait. `prefill_tokens` bounds the prompt tokens per forward pass; a
    longer prompt runs in pieces. The engine reads the model's parameters at every step, so they may change between calls. On a
    GPU, each step is one CUDA graph. `compile` also compiles the layers, which takes half a minute once; it defaults to true
    for models that are large enough to benefit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KV | None = None,
        *,
        slots: int = 64,
        prefill_tokens: int = PREFILL_TOKENS,
        compile: bool | None = None,
    ):
        self.kv = KV() if kv is None else kv
        if not isinstance(self.kv, KV):
            raise UserError(f"kv = {kv!r} is invalid: pass a KV, as in Engine(model, KV(policy='rkv', budget=512)).")
        if isinstance(model, str):
            raise UserError(
                f"model = {model!r} is a name, not a loaded model: load it first, as in Engine(load_model({model!r}))."
            )
        self.policy = from_settings(self.kv)
        for name, value in (("slots", slots), ("prefill_tokens", prefill_tokens)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} = {value!r} is invalid: it must be an integer of at least 1.")
        self.model, self.slots, self.prefill_tokens = model, slots, prefill_tokens
        before = model.config._attn_implementation
        self.limits = prepare(model)
        try:
            with on(self.limits.shape.device):
                check_model(model, self.limits)
        except UserError:
            model.set_attn_implementation(before)
            raise
        device = self.limits.shape.device
        self.schedule = Schedule.of(self.kv, self.policy.evicts)
        self.rotary = rotary_of(model, self.kv.policy) if self.policy.uses_statistics else None
        self.statistics: Statistics = {}
        """Statistics of the model's queries and keys, if they are needed; empty until they are gathered or loaded."""
        self.calibrated_tokens = 0
        """Number of prompt tokens from which `generate` gathered the statistics, at most ENOUGH_TOKENS. A call with more tokens
        gathers them again."""
        self.rollout_quantiser: Quantiser | None = None
        """Quantiser of the rollouts of the next call; None for the model's dtype. New statistics replace it."""
        self.cache_quantiser = self._new_quantiser()
        """Quantiser of the cache; None for the model's dtype. New scales are written into it, because captured graphs read it."""
        self.chunk = CHUNK_STEPS.get(device.type, CHUNK_STEPS["cpu"])
        self.compile = sum(map(torch.numel, model.parameters())) >= WORTH_COMPILING if compile is None else compile
        self.graphs: GraphRunner | None = None
        self.use_graphs = graphs_work_on(device, self.kv)
        self.stats = Stats()
        if self.is_sparse and not self.limits.shape.full_layers:
            window = self.limits.shape.window
            notice(f"Every layer of the model has a window of {window} tokens: kv.budget and kv.dtype have no effect.")
        self.cache = self._new_cache()
        self.pool_reserved = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int = 1,
        sampling: Sampling | None = None,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        record: bool | Collection[int] = True,
        routing: bool = False,
        take: Callable[[], int | None] | None = None,
        progress: Callable[[Progress], None] | None = None,
        on_end: Callable[[int, Rollout], None] | None = None,
        allow_beyond_context: bool = False,
    ) -> list[Rollout]:
        """Sample rollouts and return them in prompt order, with all samples of a prompt together.

        `prompts` are lists of token ids. `seeds` sets the seed of each rollout; by default they derive from `sampling.seed`.
        `limits` sets a response length per rollout, at most `sampling.max_tokens`. `record=False` skips recording evictions
        (`evicted_at` is then None); a set of indices records only those rollouts. `routing` records the experts that routers
        choose (`Rollout.routing`), which replay and training then use. `take` returns the index of the next prompt, or None at
        the end; engines that share prompts each return the rollouts of the prompts they took. `progress` is called
        between chunks of steps, with the new tokens of each rollout; it may end rollouts with `Progress.abort`. `on_end` is
        called with the index and the record of each finished rollout. An exception in a callback ends the whole call.
        `allow_beyond_context` permits responses beyond the model's context.
        """
        sampling = sampling or Sampling()
        if prepare(self.model).shape != self.limits.shape:
            raise UserError("The model's dtype or device has changed since the Engine was created: create a new Engine.")
        requests = self.request_limits.requests(
            prompts, samples, sampling, seeds, limits, record, allow_beyond_context=allow_beyond_context
        )

        prompt_lengths = [len(request.prompt) for request in requests[::samples]]
        longest = max(prompt_lengths) + sampling.max_tokens
        tokens = min(ENOUGH_TOKENS, sum(prompt_lengths))
        if self.needed_statistics and self.calibrated_tokens < tokens:
            self.calibrate(prompts, longest)
            self.calibrated_tokens = tokens
        self._grow_windows(longest)
        if self.schedule.stores_prompts and not self.pool_reserved:
            self._grow_pool(prompt_lengths, sampling.max_tokens, samples)
        if self.cache.prompts is not None:
            self.cache.prompts.choose_reads(prompt_lengths, samples)
        generation = Generation(
            self.model,
            self.cache,
            self.policy,
            self.schedule,
            sampling,
            requests,
            stop=frozenset(sampling.stop if sampling.stop is not None else self._model_stop_ids()),
            chunk=self.chunk,
            prefill_tokens=self.prefill_tokens,
            progress=progress,
            on_end=on_end,
            more=None if take is None else partial(_next_group, take, requests, samples),
            graphs=self._graphs(),
            quantiser=self.rollout_quantiser,
            routers=install(self.model) if routing else None,
        )
        self.stats = generation.stats
        try:
            with torch.no_grad(), eval_mode(self.model), on(self.limits.shape.device):
                rollouts = generation.run()
            self.use_graphs = isinstance(generation.runner, GraphRunner)  # after a failed capture, never try again
            return rollouts
        except BaseException:
            self.cache.clear()  # a failed call may leave NaNs, which must not affect the next call
            raise

    @property
    def is_sparse(self) -> bool:
        """True if keys are evicted, quantised, or both."""
        return self.policy.evicts or self.kv.quantised

    @property
    def needed_statistics(self) -> tuple[str, ...]:
        """Names of the statistics of the model that the cache and the policy need."""
        if not self.limits.shape.full_layers:
            return ()
        return (*(KEY_SCALES if self.kv.quantised else ()), *self.policy.uses_statistics)

    def calibrate(self, prompts: Sequence[Sequence[int]], tokens: int, world: World = ALONE) -> None:
        """Gather the statistics that the cache and the policy need, from some of these prompts and at positions up to `tokens`.
        Do nothing if they need none. The ranks of `world` share the work and get the same statistics.

        `generate` calls this with its own prompts if there are no statistics yet, or only statistics of a few tokens.
        """
        if not self.needed_statistics:
            return
        collectors: list[Collector] = [KeyRanges()] if self.kv.quantised else []
        if self.rotary is not None:
            collectors.append(self.policy.collector(self.rotary))
        longest = tokens if self.kv.quantised else 0  # queries before rotation do not depend on positions
        with on(self.limits.shape.device):
            calibrate(self.model, prompts, longest, collectors, world)
        self.load_statistics({name: each for made in collectors for name, each in made.statistics().items()})

    def load_statistics(self, statistics: Statistics) -> None:
        """Use these statistics from the next call on. Do nothing if the engine needs none, or if there are none. If some are
        missing, print a notice and use none of them."""
        if self._use_statistics(statistics):
            self.calibrated_tokens = ENOUGH_TOKENS

    def _use_statistics(self, statistics: Statistics) -> bool:
        """Copy these statistics into the engine without marking them as complete. Return whether they are used."""
        needed = self.needed_statistics
        if not needed or not statistics:
            return False
        problem, layers = "", self.cache.shape.layers
        if missing := [name for name in needed if name not in statistics]:
            problem = f"lack {', '.join(missing)}, which kv.policy = {self.kv.policy} and kv.dtype = {self.kv.dtype} need"
        elif any(len(statistics[name]) != layers for name in needed):
            problem = (
                f"are of {counted(len(statistics[needed[0]]), 'layer')}, but {layers} of the model "
                f"{agreeing(layers, 'attends', 'attend')} to all tokens"
            )
        if problem:
            notice(f"The stored statistics {problem}: all statistics are gathered again, and results may differ slightly.")
            return False
        if self.cache_quantiser is not None:
            self._load_scales(key_scales(statistics), self.cache_quantiser)
        device = self.limits.shape.device
        self.cache.statistics = {name: statistics[name].to(device) for name in self.policy.uses_statistics}
        self.statistics = {name: statistics[name] for name in needed}
        return True

    def _load_scales(self, scales: KeyScales, quantiser: Quantiser) -> None:
        if scales.step_LHD.shape != quantiser.scales.step_LHD.shape:
            raise UserError(
                f"The statistics are of keys [layers, heads, channels] = {list(scales.step_LHD.shape)}, but the model has "
                f"{list(quantiser.scales.step_LHD.shape)}: use the statistics of this model, or gather them again."
            )
        for mine, new in zip(quantiser.scales, scales, strict=True):
            mine.copy_(new)  # in place, because captured graphs read it
        self.rollout_quantiser = replace(quantiser, scales=scales)

    def _new_quantiser(self) -> Quantiser | None:
        """Return the quantiser of a quantised cache, on the device. Its scales are not set yet."""
        shape = self.limits.shape.full
        if not self.kv.quantised:
            return None
        scales = KeyScales.unset(shape.layers, shape.kv_heads, shape.head_dim, shape.device)
        return Quantiser(self.kv.dtype, scales, with_centre=not self.limits.plain)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights by name into the model, in place: `engine.update_weights(learner.named_parameters())`.

        If the engine's own model is trained, no call is needed: the engine reads its parameters at every step. The dtype may
        differ. Call it between `generate` calls, because a rollout would otherwise have tokens of two policies.
        """
        targets = self.model.state_dict(keep_vars=True)
        for name, weight in weights:
            if name not in targets or targets[name].shape != weight.shape:
                has = f"has shape {tuple(targets[name].shape)}" if name in targets else "does not exist"
                raise UserError(
                    f"The weight {name} of shape {tuple(weight.shape)} {has} in the engine's model: pass the weights of the same "
                    "architecture."
                )
            targets[name].copy_(weight)

    def reserve_dense(
        self, prompt_tokens: int, max_tokens: int, prompts: int, samples: int, *, kv_bytes: int | None = None
    ) -> None:
        """Allocate a dense cache for `samples` responses of at most `max_tokens` tokens to each of `prompts` prompts of at most
        `prompt_tokens` tokens. If the cache is sparse, allocate only the windows of windowed layers.

        By default, no sequence ever waits for pages. With `kv_bytes`, keys and values take at most that many bytes, and the
        cache keeps its size: if pages run out, the youngest sequences wait and are recomputed.
        """
        self._grow_windows(prompt_tokens + max_tokens)
        if self.policy.evicts:
            return
        self.pool_reserved = False
        token_bytes = self.cache.token_bytes
        if kv_bytes is None or not token_bytes:  # every layer has a window
            self._grow_pool([prompt_tokens] * prompts, max_tokens, samples)
            return
        fixed = self.cache.fixed_bytes
        pages = (kv_bytes - fixed) // (PAGE_TOKENS * token_bytes) - self.slots * DENSE_SLOT_TOKENS // PAGE_TOKENS
        least = least_dense_pages(prompt_tokens, max_tokens)
        if pages < least:
            needed = (least * PAGE_TOKENS + self.slots * DENSE_SLOT_TOKENS) * token_bytes + fixed
            raise UserError(
                f"kv_bytes = {kv_bytes:,} is too small: {counted(self.slots, 'slot')} and one sequence of "
                f"{prompt_tokens + max_tokens:,} tokens take {needed:,}. Use fewer slots, shorter responses or more memory."
            )
        self._allocate_pool(pages, prompt_tokens + max_tokens)
        self.pool_reserved = True

    def reserve_prompts(self, tokens: int, prompts: int, samples: int) -> None:
        """Allocate a prompt store for `samples` responses to each of `prompts` prompts of at most `tokens` tokens.

        The store then keeps its size: groups wait for free pages, and a prompt that exceeds it is refused. Do nothing if
        prompts are not protected.
        """
        if self.kv.stores_prompts:
            self.pool_reserved = False
            self._grow_pool([tokens] * prompts, 0, samples)
            self.pool_reserved = True

    def resize(self, budget: int, slots: int) -> None:
        """Replace the cache by one with another budget and number of slots, between calls. Statistics stay.

        The current cache, its prompt store and its graphs are freed first. Reserve the prompt store again if it was reserved.
        """
        self.kv = KV(**self.kv.model_dump() | {"budget": budget})
        self.policy = from_settings(self.kv)
        self.slots, self.schedule = slots, Schedule.of(self.kv, self.policy.evicts)
        self.graphs, self.pool_reserved = None, False
        if hasattr(self, "cache"):  # else an earlier call ran out of memory
            del self.cache
        self.cache = self._new_cache()
        self._use_statistics(self.statistics)

    def _new_cache(self) -> SlotCache:
        ring = self.policy.window if self.policy.uses_queries else 0
        capacity = self.kv.capacity if self.policy.evicts else DENSE_SLOT_TOKENS
        return SlotCache(self.limits.shape, self.slots, capacity, ring, quantiser=self.cache_quantiser)

    @contextmanager
    def larger_store(self, pages: int, longest: int) -> Iterator[None]:
        """Inside the block, use a prompt store of `pages` pages for prompts of at most `longest` tokens. Do nothing if the
        current store is as large. The current store and its graphs are restored after the block."""
        store, graphs, reserved = self.cache.prompts, self.graphs, self.pool_reserved
        if not self.kv.stores_prompts or (store is not None and pages <= store.pages):
            yield
            return
        try:
            self._allocate_pool(pages, longest)
            self.pool_reserved = True
            yield
        finally:
            self.cache.prompts, self.graphs, self.pool_reserved = store, graphs, reserved

    @property
    def request_limits(self) -> RequestLimits:
        return RequestLimits(self.limits, self.cache.prompts if self.pool_reserved else None)

    def check_prompt(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise the PromptError that `generate` would raise for this prompt."""
        self.request_limits.check_prompt(prompt, sampling)

    def most_prompt_tokens(self, sampling: Sampling) -> int | None:
        """Return the longest prompt in tokens that `check_prompt` accepts; None if its length is not limited."""
        return self.request_limits.most_prompt_tokens(sampling)

    def _graphs(self) -> GraphRunner | None:
        """Return the graph runner, or None if steps cannot be captured. It is rebuilt if the cache or the weights have moved in
        memory."""
        if not self.use_graphs:
            self.graphs = None  # free the memory of a runner whose step could not be captured
        elif self.graphs is None or not self.graphs.fits(self.model, self.cache, self.chunk):
            self.graphs = None  # free its memory before the new graphs are captured
            unmerged = any(hasattr(module, "get_delta_weight") for module in self.model.modules())
            self.graphs = GraphRunner(self.model, self.cache, self.chunk, compile=self.compile and not unmerged)
        return self.graphs

    def _grow_pool(self, prompt_lengths: list[int], max_tokens: int, samples: int) -> None:
        """Enlarge the pool of pages for a call with these prompts and, in a dense cache, responses of `max_tokens` tokens."""
        longest, store = max(prompt_lengths), self.cache.prompts
        if self.policy.evicts:
            pages = pool_pages(prompt_lengths, self.slots, samples)
        else:
            pages, longest = dense_pages(prompt_lengths, max_tokens, self.slots, samples), longest + max_tokens
        if store is None or store.pages < pages or store.longest < longest:
            if store is not None:
                pages, longest = max(pages, store.pages), max(longest, store.longest)
            del store
            self._allocate_pool(pages, longest)

    def _allocate_pool(self, pages: int, longest: int) -> None:
        self.cache.prompts = self.graphs = None  # free the old pool before the new one is allocated
        responses = not self.policy.evicts
        self.cache.prompts = PromptStore(
            self.cache.shape, self.slots, pages, longest, self.cache_quantiser, responses=responses
        )

    def _grow_windows(self, longest: int) -> None:
        """Allocate the rings of sliding-window layers for sequences of at most `longest` tokens, unless they fit."""
        shape, windows = self.limits.shape, self.cache.windows
        if shape.windowed and (windows is None or not windows.fits(longest)):
            del windows
            self.cache.windows = self.graphs = None  # free the old rings before the new ones are allocated
            self.cache.windows = WindowStore(shape, self.slots, window_capacity(longest))

    def _model_stop_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.model.config.get_text_config().eos_token_id
        if ids is None:
            return []
        ids = [ids] if isinstance(ids, int) else list(ids)
        if not all(type(token) is int for token in ids):
            raise UserError(f"The model's eos_token_id = {quoted(ids)} is not a token id: fix its generation_config.json.")
        return ids


def _next_group(take: Callable[[], int | None], requests: list[Request], samples: int) -> list[Request]:
    """Return the requests of the prompt whose index `take` returns; an empty list if it returns None."""
    prompt = take()
    return [] if prompt is None else requests[prompt * samples : (prompt + 1) * samples]
