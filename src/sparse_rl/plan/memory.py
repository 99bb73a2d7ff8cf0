"""Compute the GPU memory of a training run by phase, and choose the slots, pages and checkpointed layers that fit.

`parts.py` computes the parts of a phase. The peak is the phase with the most bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ..config import KV, Config
from ..errors import UserError
from ..format import GIB, gib
from ..sizes import (
    MAX_AUTO_SLOTS,
    SCRATCH_FLOOR_BYTES,
    SCRATCH_SHARE,
    codes_problem,
    dense_bytes,
    dense_pages,
    live_dense_pages,
    page_table_width,
    pool_pages,
    running_in_pages,
    slot_bytes,
    store_bytes,
    token_bytes,
    window_bytes,
)
from .dimensions import Dimensions
from .microbatch import largest_pack, rollouts_of_rank
from .parts import (
    STEP_8BIT_BYTES,
    expanded_bytes,
    gathered_bytes,
    gradient_bytes,
    head_bytes,
    itemsize,
    prefill_parts,
    resident,
    sharded,
    step_bytes,
    transient_per_token,
    update_parts,
)

CONTEXT_BYTES = int(0.55 * GIB)
"""Bytes that CUDA and its libraries allocate outside torch's allocator."""
RESERVED_SHARE = 0.05
"""Memory that torch's allocator reserves but cannot use (fragmentation), as a share of the peak."""


@dataclass(frozen=True)
class Phase:
    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def in_words(self) -> str:
        """Parts of at least 0.01 GiB, such as `weights 2.88, KV cache 1.20`."""
        return ", ".join(f"{name} {gib(count)}" for name, count in self.parts.items() if count >= GIB // 100)


@dataclass(frozen=True)
class Plan:
    """The memory plan of a run. `memory_bytes` is the GPU memory available to torch; None if it is not limited."""

    config: Config
    dims: Dimensions
    prompt_tokens: int
    slots: int
    memory_bytes: int | None = None
    phases: list[Phase] = field(default_factory=list)
    checkpointed_layers: int = 0
    """Number of layers that recompute their activations in the backward pass."""
    evaluation_slots: int = 0
    """Slots of a separate evaluation cache; 0 if the evaluation uses the sampler's cache or is off."""
    evaluation_caches: list[str] = field(default_factory=list)
    """Caches of the held-out evaluation: dense, sparse or both; empty if it is off."""
    pages: int = 0
    """Pages of the sampler's dense cache; 0 if it is sparse."""
    evaluation_pages: int = 0
    """Pages of a second prompt store for an evaluation in the sampler's cache; 0 if the sampler's store is used."""

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak_bytes(self) -> int:
        """Predicted value of `torch.cuda.max_memory_allocated`."""
        return self.fullest.total

    @cached_property
    def needed_bytes(self) -> int:
        """Bytes that torch must reserve: the peak, the memory pool of the decode graphs, and fragmentation."""
        return int(peak_held(self.phases, self.pool_bytes) * (1 + RESERVED_SHARE))

    @property
    def pool_bytes(self) -> int:
        return step_bytes(self.dims, self.slots, itemsize(self.config))

    @property
    def running(self) -> int:
        """Sequences of full length that run at once: all slots, or as many as fill the pages of a dense cache."""
        if self.config.sampler_kv.policy != "full":
            return self.slots
        rollout = self.config.rollout
        prompts = [self.prompt_tokens] * rollout.prompts_per_step
        return running_in_pages(self.pages, prompts, rollout.max_tokens, self.slots, rollout.samples_per_prompt)

    @property
    def fits(self) -> bool:
        return self.memory_bytes is None or self.needed_bytes <= self.memory_bytes

    @property
    def free_bytes(self) -> int:
        return (self.memory_bytes or 0) - self.needed_bytes

    def replanned(self, config: Config, slots: int | None = None) -> "Plan":
        """Return the plan of another configuration of the same model, prompts and GPU."""
        return make_plan(config, self.dims, memory_bytes=self.memory_bytes, prompt_tokens=self.prompt_tokens, slots=slots)


def peak_held(phases: list[Phase], pool_bytes: int) -> int:
    """Return the maximum over phases of the allocated bytes plus the graph pool. Sampling already includes the pool."""
    return max(phase.total + (0 if phase.name == "sampling" else pool_bytes) for phase in phases)


def make_plan(
    config: Config, dims: Dimensions, *, memory_bytes: int | None = None, prompt_tokens: int = 256, slots: int | None = None
) -> Plan:
    """Return the plan of a run. If `rollout.slots` is "auto", use as many slots as fit, or `samples_per_prompt` if none do. If
    `kv.budget` is "auto", plan with half of the longest sequence; `Plan.config` then has that number."""
    config = config.with_known_budget(prompt_tokens)
    if config.model.lora.base == "4bit" and not dims.takes_4bit_base:
        raise UserError(
            f"model.lora.base = 4bit cannot store {dims.model}: less than half of its layers' weights are in linear layers. Set "
            "model.lora.base = auto."
        )
    kv = config.sampler_kv
    if kv.quantised and dims.full.layers and (problem := codes_problem(dims.full.head_dim, kv.dtype)):
        raise UserError(problem)
    wanted = config.rollout.slots if slots is None else slots
    if wanted == "auto":  # most_slots calls make_plan with a number of slots, so the recursion ends there
        wanted = most_slots(config, dims, memory_bytes, prompt_tokens, auto_limit(config)) or config.rollout.samples_per_prompt
    slots = int(wanted)
    least, most = pool_sizes(config, slots, prompt_tokens)

    def plan_with(checkpointed: int, pages: int = least) -> Plan:
        phases = step_phases(config, dims, slots, prompt_tokens, checkpointed, pages)
        eval_slots = evaluation_slots(config, dims, phases, slots, prompt_tokens, pages)
        is_sparse, problems = config.sampler_kv.is_sparse, config.evaluated_problems
        caches = config.evaluation_caches(is_sparse=is_sparse, dense_slots=eval_slots, problems=problems)
        eval_pages = evaluation_pages(config, dims, phases, slots, prompt_tokens) if "sparse" in caches else 0
        if eval_slots and (config.eval.slots != "auto" or "dense" in caches):
            always = always_parts(config, dims, slots, prompt_tokens, pages)
            phases = [*phases, evaluation_phase(config, dims, always, eval_slots, prompt_tokens)]
        return Plan(
            config,
            dims,
            prompt_tokens,
            slots,
            memory_bytes=memory_bytes,
            phases=phases,
            checkpointed_layers=checkpointed,
            evaluation_slots=eval_slots,
            evaluation_caches=caches,
            pages=pages,
            evaluation_pages=eval_pages,
        )

    chosen = config.optimizer.gradient_checkpointing
    layers = dims.layers if chosen else 0
    if chosen == "auto" and plan_with(dims.layers - 1).fits:
        layers = dims.layers - largest(lambda plain: plan_with(dims.layers - plain).fits, dims.layers)
    plan = plan_with(layers)
    if least == most or not plan.fits:
        return plan
    unlimited = memory_bytes is None or not dims.full.layers  # without full layers, pages take no memory
    return plan_with(layers, most if unlimited else min(most, least + more_pages(plan)))


def pool_sizes(config: Config, slots: int, prompt_tokens: int) -> tuple[int, int]:
    """Return the fewest and the most pages of the sampler's dense cache; (0, 0) if it is sparse.

    The fewest hold the live tokens of responses of uniform lengths. With the most, no sequence ever waits for pages.
    """
    rollout = config.rollout
    if config.sampler_kv.policy != "full":
        return 0, 0
    prompts = [prompt_tokens] * rollout.prompts_per_step
    most = dense_pages(prompts, rollout.max_tokens, slots, rollout.samples_per_prompt)
    return min(most, live_dense_pages(prompt_tokens, rollout.max_tokens, slots, rollout.samples_per_prompt)), most


def more_pages(plan: Plan) -> int:
    """Return the pages by which a dense cache may grow within the free memory. A page also counts in scratch memory."""
    page_bytes = dense_bytes(plan.dims.full, 0, 1, itemsize(plan.config), plan.config.sampler_kv.dtype)
    return int(plan.free_bytes / (page_bytes * (1 + SCRATCH_SHARE) * (1 + RESERVED_SHARE)))


def auto_limit(config: Config) -> int:
    return min(MAX_AUTO_SLOTS, rollouts_of_rank(config))


def most_slots(config: Config, dims: Dimensions, memory_bytes: int | None, prompt_tokens: int, limit: int) -> int:
    """Return the largest number of slots that fits, at most `limit`; 0 if not even one slot fits."""
    tried = [config]
    if config.optimizer.gradient_checkpointing == "auto":  # fits if all layers recompute, which takes one plan to see
        tried = [config.changed(optimizer={"gradient_checkpointing": True}), config]

    def fit(slots: int) -> bool:
        plans = (make_plan(each, dims, memory_bytes=memory_bytes, prompt_tokens=prompt_tokens, slots=slots) for each in tried)
        return any(plan.fits for plan in plans)

    return largest(fit, limit)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to `limit` for which `fits` is true; 0 if there is none. `fits` must be monotonic."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# The cache


def cache_parts(config: Config, dims: Dimensions, slots: int, prompt_tokens: int, pages: int) -> dict[str, int]:
    """Return the bytes of the sampler's cache. `pages` are those of a dense cache."""
    kv, rollout, size = config.sampler_kv, config.rollout, itemsize(config)
    keys, metadata = slot_bytes(dims.full, kv, size)
    windows = slots * window_bytes(dims, prompt_tokens + rollout.max_tokens, size)
    stored, tables = 0, 0
    if kv.stores_prompts:
        lengths = [prompt_tokens] * rollout.prompts_per_step
        stored, tables = store_bytes(dims.full, lengths, slots, rollout.samples_per_prompt, size, kv.dtype)
    if kv.policy == "full":
        tables = 4 * slots * page_table_width(prompt_tokens + rollout.max_tokens)
    cache = slots * keys + dense_bytes(dims.full, 0, pages, size, kv.dtype)
    parts = {"KV cache": cache, "prompt store": stored, "positions, queries": slots * metadata + tables}
    parts |= {"sliding windows": windows} if windows else {}
    return parts | ({"recurrent states": slots * dims.state_bytes(size)} if dims.states else {})


# The phases of a step


def always_parts(config: Config, dims: Dimensions, slots: int, prompt_tokens: int, pages: int) -> dict[str, int]:
    return resident(config, dims) | cache_parts(config, dims, slots, prompt_tokens, pages)


def step_phases(
    config: Config, dims: Dimensions, slots: int, prompt_tokens: int, checkpointed: int, pages: int = 0
) -> list[Phase]:
    """Return the phases of a step. `pages` are those of the sampler's dense cache."""
    always = always_parts(config, dims, slots, prompt_tokens, pages)
    share = SCRATCH_SHARE * token_bytes(dims, itemsize(config)) / token_bytes(dims, itemsize(config), config.sampler_kv.dtype)
    scratch = max(share * (always["KV cache"] + always["prompt store"]), SCRATCH_FLOOR_BYTES)
    if config.sampler_kv.policy == "full":  # at most a page of each slot moves at once, keys and then values
        scratch = min(scratch, dense_bytes(dims.full, 0, slots, itemsize(config), config.sampler_kv.dtype) // 2)
    step = {"decode step": step_bytes(dims, slots, itemsize(config))}
    step |= {"copy of states": always["recurrent states"]} if dims.states else {}  # while a graph is captured
    prompts = -(-config.rollout.prompts_per_step // config.ranks.count)
    prefill = prefill_parts(config, dims, config.sampler_kv, slots, prompts, prompt_tokens)
    pack = largest_pack(prompt_tokens, config, plain=dims.plain)
    expanded = {"expanded layer": expanded_bytes(config, dims)}
    old = expanded | {
        "gathered layers": gathered_bytes(config, dims),
        "activations": pack.tokens * transient_per_token(config, dims, backward=False),
        "logits chunk": head_bytes(config, dims, pack.responses, backward=False),
    }
    largest_weight = dims.largest_weight
    lora = config.model.lora
    if lora.rank:
        largest_weight = lora.rank * dims.widest
    optimizer = {
        "gradients": 4 * dims.params // config.ranks.count if sharded(config) else gradient_bytes(config, dims),
        "optimizer step": STEP_8BIT_BYTES * largest_weight if config.optimizer.state == "8bit" else 0,
    }
    return [
        Phase("prefill", always | prefill),
        Phase("sampling", always | step | expanded | {"compaction scratch": int(scratch)}),
        Phase("old log-probs", always | old),
        Phase("update", always | update_parts(config, dims, prompt_tokens, checkpointed)),
        Phase("optimizer", always | optimizer),
    ]


def evaluation_slots(config: Config, dims: Dimensions, phases: list[Phase], slots: int, prompt_tokens: int, pages: int) -> int:
    """Return the slots of a separate evaluation cache; 0 if the evaluation uses the sampler's cache or is off.

    The number is `eval.slots`. With "auto", use as many slots as keep the evaluation below the peak of a training step, and at
    least one. The evaluation then does not reduce the memory of the sampler and the learner.
    """
    problems, wanted = config.evaluated_problems, config.eval.slots
    sampler_alone = not config.sampler_kv.is_sparse or config.eval.cache == "sparse"
    if not problems or (sampler_alone and wanted == "auto"):
        return 0
    if wanted != "auto":
        return min(wanted, problems)
    pool = step_bytes(dims, slots, itemsize(config))
    room = peak_held(phases, pool) - pool
    always = always_parts(config, dims, slots, prompt_tokens, pages)

    def fit(count: int) -> bool:
        return evaluation_phase(config, dims, always, count, prompt_tokens).total <= room

    return largest(fit, problems) or 1


def evaluation_phase(config: Config, dims: Dimensions, always: dict[str, int], count: int, prompt_tokens: int) -> Phase:
    """Return the evaluation phase: a cache of `count` slots and its decode graphs, in addition to the parts in `always`."""
    size = itemsize(config)
    kv = config.sampler_kv if config.eval.cache == "sparse" else KV(policy="full")
    longest = prompt_tokens + config.rollout.max_tokens
    states = 2 * dims.state_bytes(size)  # and a copy while a graph is captured
    cache = count * (sum(slot_bytes(dims.full, kv, size)) + window_bytes(dims, longest, size) + states)
    if kv.stores_prompts:
        cache += sum(store_bytes(dims.full, [prompt_tokens] * config.eval.problems, count, 1, size, kv.dtype))
    if kv.policy == "full":
        live = live_dense_pages(prompt_tokens, config.rollout.max_tokens, count, 1)
        cache += dense_bytes(dims.full, 0, live, size, kv.dtype)
    parts = prefill_parts(config, dims, kv, count, config.eval.problems, prompt_tokens)
    parts["decode step"] += step_bytes(dims, count, size)
    return Phase("evaluation", always | parts | {"evaluation cache": cache})


def evaluation_pages(config: Config, dims: Dimensions, phases: list[Phase], slots: int, prompt_tokens: int) -> int:
    """Return the pages of a second prompt store for an evaluation in the sampler's cache; 0 if it would not help.

    An evaluation has one response per prompt, so its prompts take more pages than those of a step. The store has a prompt for
    every slot, or as many as keep the evaluation below the peak of a training step.
    """
    kv, rollout, size = config.sampler_kv, config.rollout, itemsize(config)
    if not kv.stores_prompts or config.eval.slots != "auto":
        return 0
    wanted = pool_pages([prompt_tokens] * config.evaluated_problems, slots, 1)
    existing = pool_pages([prompt_tokens] * rollout.prompts_per_step, slots, rollout.samples_per_prompt)
    pool = step_bytes(dims, slots, size)
    parts = prefill_parts(config, dims, kv, slots, config.evaluated_problems, prompt_tokens)
    used = sum((always_parts(config, dims, slots, prompt_tokens, 0) | parts).values()) + pool
    page_bytes = dense_bytes(dims.full, 0, 1, size, config.sampler_kv.dtype)
    found = min(wanted, (peak_held(phases, pool) - pool - used) // page_bytes) if page_bytes else wanted
    return found if found > existing else 0


def largest_budget(plan: Plan) -> int:
    """Return the largest `kv.budget` that fits with the plan's slots, up to the longest sequence or the plan's own budget; 0 if
    none fits. A budget beyond the longest sequence never evicts."""
    config, below = plan.config, plan.config.kv.least_budget - 1

    def fit(more: int) -> bool:
        return plan.replanned(config.with_budget(below + more), plan.slots).fits

    found = largest(fit, max(config.longest_kept(plan.prompt_tokens), config.kv.kept_tokens) - below)
    return below + found if found else 0
