"""The longest possible pass of the learner, tried before the first step: memory runs out at once or not at all."""

import torch
from transformers import PreTrainedModel

from ..errors import UserError
from ..kv.cache import CacheShape
from ..kv.trace import TraceRecorder
from ..learner.correction import correct
from ..learner.optimizer import Optimizer, checkpointed
from ..learner.replay import ReplayKind
from ..learner.update import accumulate, make_batch, response_mask
from ..rollout.rollout import Rollout
from .settings import SHADOW_METHODS, Config


def rehearse(model: PreTrainedModel, optimizer: Optimizer, prompt: list[int], config: Config, shape: CacheShape) -> None:
    """Forward and backward over a micro-batch of the longest rollouts, and room for the optimizer's moments. Leaves no trace
    in weights or moments. On a GPU only: a CPU swaps instead of failing."""
    if model.device.type != "cuda":
        return
    try:
        _rehearse(model, optimizer, prompt, config, shape)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(config) from error
    finally:
        optimizer.clear()
        torch.cuda.empty_cache()


def _rehearse(model: PreTrainedModel, optimizer: Optimizer, prompt: list[int], config: Config, shape: CacheShape) -> None:
    longest = len(prompt) + config.rollout.max_tokens
    count = max(1, min(config.rollout.rollouts_per_step, config.optimizer.tokens_per_microbatch // longest))
    rollouts = [longest_rollout(prompt, config, shape) for _ in range(count)]
    zeros = [torch.zeros(len(rollout.response), device=model.device) for rollout in rollouts]
    mask = response_mask(rollouts).to(model.device)
    corrected = correct(torch.zeros(mask.shape, device=model.device), mask, "none")
    reference = zeros if config.loss.kl_coef > 0 else None
    batch = make_batch(rollouts, torch.ones(count), zeros, corrected, config.loss, config.rollout.max_tokens, reference)
    view: ReplayKind = "sparse" if config.method in SHADOW_METHODS else "dense"
    smd = config.loss.smd if config.method == "smd" else None
    with checkpointed(model, config.optimizer.gradient_checkpointing):
        accumulate(model, batch, range(count), config.loss, view, smd, None, config.optimizer.tokens_per_microbatch)
    optimizer.allocate()


def longest_rollout(prompt: list[int], config: Config, shape: CacheShape) -> Rollout:
    """Made up, of the greatest length, its first key evicted so that a shadow pass is a real one."""
    tokens = config.rollout.max_tokens
    recorder = TraceRecorder(len(prompt), config.kv.interval)
    recorder.record(0, torch.zeros(shape.layers, shape.kv_heads, 1, dtype=torch.long))
    return Rollout(
        prompt=prompt,
        response=(prompt * (tokens // len(prompt) + 1))[:tokens],
        logprobs=torch.zeros(tokens),
        finish="length",
        kv_peak=0,
        temperature=config.rollout.temperature,
        seed=0,
        trace=recorder.finish(shape.layers, shape.kv_heads, len(prompt) + tokens),
    )


def out_of_memory(config: Config) -> UserError:
    optimizer = config.optimizer
    remedies = []
    if not optimizer.gradient_checkpointing:
        remedies.append("--optimizer.gradient-checkpointing true")
    if optimizer.tokens_per_microbatch > config.rollout.max_tokens:
        remedies.append(
            f"--optimizer.tokens-per-microbatch {max(config.rollout.max_tokens, optimizer.tokens_per_microbatch // 2)}"
        )
    if optimizer.state == "fp32":
        remedies.append("--optimizer.state offload")
    if not config.model.lora.rank:
        remedies.append("--model.lora.rank 16")
    remedies.append("a smaller rollout.slots or max_tokens")
    return UserError(f"The GPU's memory does not hold a step of this run: try {', or '.join(remedies)}.")
