"""Plan the memory of a run on its GPU: the number of slots, the expected peak, and the error when memory runs out."""

import torch
from torch import device as Device
from transformers import PreTrainedModel

from ..config import Config
from ..errors import OutOfMemory, UserError
from ..format import gib
from ..gpu_memory import room_bytes
from ..host_memory import machine_bytes
from ..models.four_bit import weight_count
from ..monitor.budget import ladder
from ..plan import Plan, dimensions, make_plan
from ..plan.dimensions import from_config
from ..plan.memory import largest
from ..plan.microbatch import rollouts_of_rank
from ..plan.remedies import sentence
from ..rollout.engine import Engine
from ..sizes import MAX_AUTO_SLOTS, dense_bytes, live_dense_pages, window_bytes
from ..world import World

CPU_SLOTS = 256
"""Maximum number of automatic slots on a CPU. More slots are not faster."""
UNPLANNED_SLOTS = 64
"""Number of automatic slots on a GPU if the model cannot be planned. The preflight tests whether they fit."""


def plan_run(config: Config, model: PreTrainedModel, prompt_tokens: int) -> Plan | None:
    """Return the memory plan of a run; None on a CPU, for an unknown architecture, or if the number of weights differs from that
    of the text configuration."""
    if model.device.type != "cuda":
        return None
    try:
        dims = from_config(model.config.get_text_config().to_dict(), config.model.path)
    except UserError:
        return None
    if dims.params != weight_count(model):
        return None
    return make_plan(config, dims, memory_bytes=room_bytes(model.device), prompt_tokens=prompt_tokens)


def slots_of(config: Config, plan: Plan | None, device: Device) -> int:
    """Return the number of slots: `rollout.slots`, or an automatic number if that is "auto".

    On a GPU, the automatic number is the plan's: as many slots as fit, or `samples_per_prompt` if none fit by the plan. The
    preflight then tests that number. On a CPU it is at most 256.
    """
    if config.rollout.slots != "auto":
        return config.rollout.slots
    if device.type != "cuda":
        return min(CPU_SLOTS, rollouts_of_rank(config))
    slots = UNPLANNED_SLOTS if plan is None else plan.slots
    return min(slots, MAX_AUTO_SLOTS, rollouts_of_rank(config))


def budgets_that_fit(config: Config, plan: Plan | None, prompt_tokens: int) -> list[int]:
    """Return the budgets that `kv.budget = auto` may choose: up to the longest sequence, or to what fits in memory with a slot
    for each sample of a prompt."""
    budgets = ladder(config.kv.least_auto, config.longest_kept(prompt_tokens))
    if plan is None:
        return budgets

    def fits(count: int) -> bool:
        made = plan_budget(config, plan, budgets[count - 1])
        return made.fits and made.slots >= config.rollout.samples_per_prompt

    return budgets[: max(1, largest(fits, len(budgets)))]


def possible_budgets(config: Config, plan: Plan | None, prompt_tokens: int, world: World) -> tuple[list[int], int]:
    """Return (the budgets that fit on all ranks, the one to start with: at most half of the longest sequence)."""
    budgets = min(world.gather(budgets_that_fit(config, plan, prompt_tokens)), key=len)
    half = config.with_known_budget(prompt_tokens).kv.kept_tokens
    return budgets, max((budget for budget in budgets if budget <= half), default=budgets[0])


def plan_budget(config: Config, plan: Plan, budget: int) -> Plan:
    """Return the plan of the same run with another budget."""
    return plan.replanned(config.with_budget(budget))


def checkpointed_layers(config: Config, plan: Plan | None, model: PreTrainedModel) -> int:
    """Return the number of layers that recompute their activations.

    "auto" is the plan's number. Without a plan it is all layers on a GPU, and none on a CPU.
    """
    chosen = config.optimizer.gradient_checkpointing
    if chosen == "auto" and plan is not None:
        return plan.checkpointed_layers
    everywhere = chosen is True or (chosen == "auto" and model.device.type == "cuda")
    return model.config.get_text_config().num_hidden_layers if everywhere else 0


def dense_slots(plan: Plan | None, engine: Engine, longest: int) -> int:
    """Return the slots of the dense evaluation cache, for sequences of `longest` tokens, in addition to the sampler's cache.

    The number comes from the plan. Without a plan, the dense cache gets as many bytes as the sampler's cache.
    """
    if plan is None or not plan.evaluation_slots:
        return max(1, engine.cache.kv_bytes // max(1, longest * engine.cache.dense_token_bytes))
    return max(1, plan.evaluation_slots * (plan.prompt_tokens + plan.config.rollout.max_tokens) // longest)


def dense_bytes_of(plan: Plan | None, engine: Engine) -> int | None:
    """Return the bytes of keys and values of the sampler's dense cache, by the plan. None without a plan: the cache then has
    pages for all sequences."""
    if plan is None or not plan.pages:
        return None
    return _kv_bytes(plan, engine, plan.pages, plan.prompt_tokens + plan.config.rollout.max_tokens)


def reserve_step(engine: Engine, config: Config, plan: Plan | None, prompt_tokens: int) -> None:
    """Allocate the sliding windows, the dense pages and the prompt store of a training step. `prompt_tokens` is the length of the
    longest prompt."""
    rollout = config.rollout
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    engine.reserve_dense(prompt_tokens, rollout.max_tokens, prompts, samples, kv_bytes=dense_bytes_of(plan, engine))
    engine.reserve_prompts(prompt_tokens, prompts, samples)


def evaluation_bytes(plan: Plan | None, engine: Engine, prompt_tokens: int, max_tokens: int) -> int | None:
    """Return the bytes of keys and values for the live tokens of a dense evaluation engine. None without a plan."""
    if plan is None:
        return None
    pages = live_dense_pages(prompt_tokens, max_tokens, engine.slots, 1)
    return _kv_bytes(plan, engine, pages, prompt_tokens + max_tokens)


def _kv_bytes(plan: Plan, engine: Engine, pages: int, longest: int) -> int:
    """Return the bytes of keys and values in the slots, pages and sliding windows of a dense engine, and of recurrent states."""
    size = engine.limits.shape.dtype.itemsize
    fixed = engine.slots * (window_bytes(plan.dims, longest, size) + plan.dims.state_bytes(size))
    return dense_bytes(plan.dims.full, engine.slots, pages, size, engine.kv.dtype) + fixed


def peak_metrics(plan: Plan | None, device: Device) -> dict[str, float]:
    """Return the peak allocated memory so far and, if there is a plan, the predicted peak, in GiB. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    metrics = {"memory/peak_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    return metrics | ({"memory/predicted_gib": plan.peak_bytes / 2**30} if plan is not None else {})


def peak_line(metrics: dict[str, float]) -> str:
    peak, predicted = metrics["memory/peak_gib"], metrics["memory/predicted_gib"]
    return f"memory: peak {peak:.2f} GiB, predicted {predicted:.2f} GiB ({predicted / peak - 1:+.0%})"


def out_of_memory(config: Config, plan: Plan | None = None) -> OutOfMemory:
    """Return an error that suggests settings with which the plan fits. Without a plan, suggest settings that usually help."""
    plan = plan or _plan_by_name(config)
    if plan is None:
        return OutOfMemory(f"A training step does not fit into the GPU's memory: try {', or '.join(_usual(config))}.")
    fixed = " Slots need a fixed budget: set kv.budget to a number, too." if config.kv.budget == "auto" else ""
    return OutOfMemory(
        f"The GPU's memory of {gib(plan.memory_bytes or 0)} GiB is too small for a training step, which needs "
        f"{gib(plan.needed_bytes)} GiB or more: {sentence(plan, ran_out=True, host_bytes=machine_bytes())}.{fixed}"
    )


def _plan_by_name(config: Config) -> Plan | None:
    """Return a plan made from `model.path`, for a run that failed before planning. None without a GPU or a known shape."""
    if not torch.cuda.is_available():
        return None
    try:
        device = Device(config.model.device or "cuda")
        return make_plan(config, dimensions(config.model.path), memory_bytes=room_bytes(device))
    except UserError:
        return None


def _usual(config: Config) -> list[str]:
    optimizer = config.optimizer
    found = []
    if not optimizer.gradient_checkpointing:
        found.append("--optimizer.gradient-checkpointing true")
    if optimizer.tokens_per_microbatch > config.rollout.max_tokens:
        half = max(config.rollout.max_tokens, optimizer.tokens_per_microbatch // 2)
        found.append(f"--optimizer.tokens-per-microbatch {half}")
    if optimizer.state == "fp32":
        found.append("--optimizer.state offload")
    if not config.model.lora.rank:
        found.append("--model.lora.rank 16")
    return [*found, "a smaller rollout.max_tokens" if config.kv.budget == "auto" else "a smaller rollout.slots or max_tokens"]
