"""Compute the time of a step from FLOPs, bytes, the attainable share of a GPU's peak and the latency of a layer.

Nothing is measured.
"""

import difflib
import re
from dataclasses import dataclass

from ..config import KV, SHADOW_METHODS, Config
from ..errors import UserError
from ..format import GIB
from ..sizes import ONCE_KEYS, reads_prompts_once, token_bytes
from .dimensions import Dimensions
from .memory import Plan
from .microbatch import rollouts_of_rank, samples_per_computed_prompt
from .parts import itemsize, sharded

FLOPS_SHARE, BANDWIDTH_SHARE = 0.79, 0.9
"""Attainable shares of peak FLOP/s and bandwidth, from an H200 (780 of 989 TFLOP/s in large matrix products, 4.3 of 4.8 TB/s
in plain reads)."""
LAYER_S = 50e-6
"""Seconds that a layer of a decode step takes beyond its roofline: the latency of about ten small kernels. With a 1.5B model on an
H200: 42 microseconds with 32 slots (benchmarks/results/speed.json), 47 to 65 with 64 and 256 (step-1.5B-*-full-best.json,
rollout-1.5B*.json), but 87 with all keys in 4 bits. With 7B and 256 slots, whose products are further from their peak: 103 to 130."""
LEARNER_MFU = 0.4
"""Assumed share of the peak FLOP/s that the learner reaches."""
UNMERGED_SLOWDOWN = 3.1
"""Factor by which a decode step with unmerged adapters is slower, measured with a 7B model on an H200 (3,674 and 1,170 tokens per
second). Adapters on a base in 4 bits are not merged."""
ONCE_SHARE = 0.25
"""Cost of a further prompt token where prompts are read once for 8 samples, relative to the cost of reading it in every slot in
16 bits. Measured on an H200 with 256 slots, from 2,048 to 4,096 tokens in 16, 8 and 4 bits (benchmarks/shared_prompts.py): 0.19 to
0.25 with all samples of each prompt, 0.36 to 0.46 with 1 to 8."""
HOST_BYTES_PER_S = 20e9
"""Assumed bandwidth between GPU and host memory in bytes per second, for an offloaded optimizer."""


@dataclass(frozen=True)
class GPU:
    name: str
    memory_bytes: int
    flops: float
    """Peak FLOP/s of dense bfloat16 matrix products."""
    bandwidth: float
    """Peak memory bandwidth in bytes per second."""


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        GPU("H200", 140 * GIB, 989e12, 4.8e12),
        GPU("H100", 79 * GIB, 989e12, 3.35e12),
        GPU("B200", 178 * GIB, 2250e12, 7.7e12),
        GPU("A100", 79 * GIB, 312e12, 2.04e12),
        GPU("A100 40GB", 39 * GIB, 312e12, 1.56e12),
        GPU("L40S", 44 * GIB, 362e12, 0.864e12),
        GPU("A6000", 47 * GIB, 155e12, 0.768e12),
        GPU("RTX 5090", 31 * GIB, 209e12, 1.79e12),
        GPU("RTX 4090", 23 * GIB, 165e12, 1.01e12),
        GPU("RTX 3090", 23 * GIB, 71e12, 0.936e12),
        GPU("A10", 22 * GIB, 125e12, 0.6e12),
        GPU("L4", 22 * GIB, 121e12, 0.3e12),
    )
}


def find_gpu(name: str) -> GPU:
    """Return a GPU by its short name (`H200`, `A100-40`) or by the name the driver reports (`NVIDIA A100-SXM4-40GB`)."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    words |= {f"{word}gb" for word in words if word.isdigit()}
    named = [gpu for key, gpu in GPUS.items() if words.issuperset(key.split())]
    if named:
        return max(named, key=lambda gpu: len(gpu.name))
    close = difflib.get_close_matches(name.lower(), GPUS, n=1)
    hint = f"did you mean {GPUS[close[0]].name}?" if close else f"use one of {', '.join(gpu.name for gpu in GPUS.values())}."
    raise UserError(f"GPU {name!r} is unknown: {hint}")


def nearest_gpu(memory_bytes: int) -> GPU:
    """Return the GPU with the closest memory size."""
    return min(GPUS.values(), key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by phase, if every response has `max_tokens` tokens, and the decode speed."""

    decode_step_s: float
    prefill_s: float
    decode_s: float
    old_s: float
    update_s: float
    tokens_per_s: float
    """Decoded tokens per second of one GPU."""
    sync_s: float = 0.0
    """Seconds to copy the new weights to the samplers of all ranks; 0 on one rank."""
    exposed_s: float = 0.0
    """Seconds in old log-probs and update during which the GPUs wait for weights and gradients of other ranks."""

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s + self.old_s + self.update_s + self.sync_s


def decode_s(
    dims: Dimensions,
    slots: int,
    held: float,
    size: int,
    gpu: GPU,
    dtype: str = "auto",
    *,
    in_window: float = 0.0,
    layer_s: float = LAYER_S,
) -> float:
    """Return the seconds of a decode step with `held` cached tokens per slot, stored as `kv.dtype` says, and `in_window` tokens in
    each sliding window.

    The time is the larger of the matrix products of all slots and one read of the weights, plus one read of the cache and the
    latency `layer_s` of each layer. With a latency of 0, it is the roofline. Recurrent states are read and written.
    """
    flops, bandwidth = gpu.flops * FLOPS_SHARE, gpu.bandwidth * BANDWIDTH_SHARE
    weights = max(2 * dims.active_params * slots / flops, dims.read_params(slots) * size / bandwidth)
    whole, local = dims.attending
    bytes_per_slot = token_bytes(dims.full, size, dtype) * held * (whole / max(1, dims.full.layers))
    bytes_per_slot += token_bytes(dims.local, size) * in_window * (local / max(1, len(dims.windowed)))
    bytes_per_slot += 2 * dims.state_bytes(size)
    return weights + slots * bytes_per_slot / bandwidth + dims.layers * layer_s


def mean_held(kv: KV, prompt_tokens: int, longest: int, response_held: float) -> float:
    """Return the mean number of tokens that a slot reads in a decode step, including its prompt.

    A bounded slot that is compacted cycles between budget + 1 and budget + interval tokens. A stored prompt is read in
    addition. A dense slot, or a bounded slot that never fills, holds its prompt and on average `response_held` response
    tokens. `longest` is the maximum response length.
    """
    stored = prompt_tokens if kv.stores_prompts else 0
    if kv.policy != "full" and prompt_tokens - stored + longest > kv.capacity:
        return stored + kv.kept_tokens + (kv.interval + 1) / 2
    return prompt_tokens + response_held


def mean_in_window(window: int, prompt_tokens: int, longest: int) -> float:
    """Return the mean number of tokens in a sliding window over the `longest` decode steps of a response of full length."""
    growing = min(max(0, window - prompt_tokens), longest)
    first, last = min(window, prompt_tokens), min(window, prompt_tokens + longest)
    return (growing * (first + last) / 2 + (longest - growing) * window) / longest


def pairs(length: int, window: int | None) -> float:
    """Return the pairs of query and key of a sequence with causal attention: half of all, or those within the window."""
    return length**2 / 2 if window is None or window >= length else window * length - window**2 / 2


def decode_step_s(plan: Plan, gpu: GPU, slots: int | None = None, kv: KV | None = None, samples: int | None = None) -> float:
    """Return the seconds of a decode step at the mean number of cached tokens, by default of the sampler's slots and cache, and
    of the samples per prompt of a training step."""
    longest = plan.config.rollout.max_tokens
    kv = kv or plan.config.sampler_kv
    slots, dims, prompt = slots or plan.running, plan.dims, plan.prompt_tokens
    held = mean_held(kv, prompt, longest, longest / 2)
    size, in_window = itemsize(plan.config), mean_in_window(dims.window or 0, prompt, longest)
    samples = samples or plan.config.rollout.samples_per_prompt
    if kv.stores_prompts and reads_prompts_once(dims.full, size, prompt, slots, samples):
        further = prompt - ONCE_KEYS / (slots * dims.full.kv_heads)  # both ways take the same time up to there
        in_16_bits = token_bytes(dims.full, size) / token_bytes(dims.full, size, kv.dtype)
        held -= further * (1 - ONCE_SHARE * in_16_bits)
    slowdown = UNMERGED_SLOWDOWN if plan.config.model.lora.base == "4bit" else 1.0
    return slowdown * decode_s(dims, slots, held, size, gpu, kv.dtype, in_window=in_window)


def decode_all_s(plan: Plan, gpu: GPU, rollouts: int, slots: int, kv: KV | None = None, samples: int | None = None) -> float:
    """Return the seconds to decode `rollouts` responses of full length in waves of `slots`."""
    waves, rest = divmod(rollouts, slots)
    last = decode_step_s(plan, gpu, rest, kv, samples) if rest else 0.0
    return plan.config.rollout.max_tokens * (waves * decode_step_s(plan, gpu, slots, kv, samples) + last)


def decode_in_pages_s(
    plan: Plan, gpu: GPU, rollouts: int, running: int, kv: KV | None = None, samples: int | None = None
) -> float:
    """Return the seconds to decode `rollouts` responses of full length in a dense cache whose pages hold `running` of them on
    average. There are no waves: a waiting sequence starts as soon as others free their pages."""
    running = min(running, rollouts)
    return rollouts / running * plan.config.rollout.max_tokens * decode_step_s(plan, gpu, running, kv, samples)


def prefill_s(plan: Plan, gpu: GPU, prompts: float) -> float:
    return 2 * plan.dims.active_params * prompts * plan.prompt_tokens / (gpu.flops * FLOPS_SHARE)


def step_time(plan: Plan, gpu: GPU) -> StepTime:
    config, dims = plan.config, plan.dims
    rollout, optimizer = config.rollout, config.optimizer
    step = decode_step_s(plan, gpu)
    rollouts = rollouts_of_rank(config)
    if plan.running < plan.slots:
        decoding = decode_in_pages_s(plan, gpu, rollouts, plan.running)
    else:
        decoding = decode_all_s(plan, gpu, rollouts, plan.slots)
    length = plan.prompt_tokens + rollout.max_tokens
    prompts = rollouts / samples_per_computed_prompt(plan.prompt_tokens, config, plain=dims.plain)
    tokens = rollouts * rollout.max_tokens + prompts * plan.prompt_tokens
    whole, local = dims.attending
    attended = whole * dims.q_width * pairs(length, None) + local * dims.local.q_width * pairs(length, dims.window)
    forward = 2 * dims.active_params * tokens + 4 * rollouts * attended
    backward = 1.0 if config.model.lora.rank else 2.0  # frozen weights need no gradient
    passes = 1 + backward + plan.checkpointed_layers / dims.layers
    if config.method == "smd":  # smd adds a dense pass; without gradient if the dense model is the teacher
        passes += 1 if config.loss.smd.direction == "shadow_to_dense" else passes
    learner = gpu.flops * LEARNER_MFU
    update = passes * forward / learner
    if optimizer.state == "offload" and not config.model.lora.rank:
        update += 8 * optimizer.updates_per_step * dims.params / HOST_BYTES_PER_S  # float32 gradients there, weights back
    old = passes_before_update(config) * forward / learner
    travels = communication(plan)
    return StepTime(
        step,
        prefill_s(plan, gpu, rollouts / rollout.samples_per_prompt),
        decoding,
        max(old, travels.old_s),
        max(update, travels.update_s),
        plan.running / step,
        sync_s=travels.sync_s,
        exposed_s=max(0.0, travels.old_s - old) + max(0.0, travels.update_s - update),
    )


def steps_s(plan: Plan, gpu: GPU) -> float:
    """Return the seconds of all steps, without evaluations. A comparison counts every method like the planned one."""
    return step_time(plan, gpu).total_s * plan.config.steps * max(1, len(plan.config.compare))


def passes_before_update(config: Config) -> float:
    """Return the forward passes over a step's rollouts before its first update.

    A dense pass covers the rollouts whose training pass does not give old log-probs. Shadow methods add a pass in the sampler's
    view. A KL term adds a pass of the reference model.
    """
    dense = 1 - 1 / config.optimizer.updates_per_step if config.one_pass else 1.0
    return dense + (config.method in SHADOW_METHODS) + (config.loss.kl_coef > 0)


NODE_GPUS, NODE_BYTES_PER_S, NETWORK_BYTES_PER_S = 8, 350e9, 40e9
"""Assumed number of GPUs per machine, and bytes per second that each GPU receives within a machine and between machines."""


@dataclass(frozen=True)
class Communication:
    """Bytes that FSDP2 sends to each GPU in a step, and the transfer times. Transfers may overlap with computation."""

    gathered_bytes: float = 0.0
    reduced_bytes: float = 0.0
    old_s: float = 0.0
    update_s: float = 0.0
    sync_s: float = 0.0


def communication(plan: Plan) -> Communication:
    config, dims, ranks = plan.config, plan.dims, plan.config.ranks.count
    if not sharded(config):
        return Communication()
    length = plan.prompt_tokens + config.rollout.max_tokens
    passes = -(-rollouts_of_rank(config) * length // max(length, config.optimizer.tokens_per_microbatch))
    whole, others = dims.params * itemsize(config), (ranks - 1) / ranks
    speed = NODE_BYTES_PER_S if ranks <= NODE_GPUS else NETWORK_BYTES_PER_S
    gathers = 2 + plan.checkpointed_layers / dims.layers  # of a layer in the update: forward, backward, recomputation
    reduced = 4 * dims.params * others * (config.optimizer.updates_per_step if config.ranks.hold_gradients else passes)
    sync = whole * others
    old, update = passes_before_update(config) * passes * sync, gathers * passes * sync
    return Communication(old + update + sync, reduced, old / speed, (update + reduced) / speed, sync / speed)
