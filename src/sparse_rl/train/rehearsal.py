"""The longest possible pass of the learner, tried before the first step: memory runs out at once or not at all."""

import torch
from transformers import PreTrainedModel

from ..kv.cache import CacheShape
from ..kv.trace import TraceRecorder
from ..learner.correction import correct
from ..learner.optimizer import Optimizer, checkpointed
from ..learner.replay import ReplayKind
from ..learner.update import accumulate, make_batch, response_mask
from ..plan import Plan
from ..plan.memory import response_lengths
from ..rollout.rollout import Rollout
from .memory import out_of_memory
from .settings import SHADOW_METHODS, Config


def rehearse(
    model: PreTrainedModel,
    optimizer: Optimizer,
    prompt: list[int],
    config: Config,
    shape: CacheShape,
    plan: Plan | None = None,
) -> None:
    """Forward and backward over two micro-batches of the longest rollouts beside the optimizer's moments and the sampler's
    cache. Leaves no trace in weights or moments. On a GPU only: a CPU swaps instead of failing."""
    if model.device.type != "cuda":
        return
    try:
        _rehearse(model, optimizer, prompt, config, shape)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(config, plan) from error
    finally:
        optimizer.clear()
        torch.cuda.empty_cache()


def _rehearse(model: PreTrainedModel, optimizer: Optimizer, prompt: list[int], config: Config, shape: CacheShape) -> None:
    rollouts = [longest_rollout(prompt, tokens, config, shape) for tokens in response_lengths(len(prompt), config)]
    count = len(rollouts)
    zeros = [torch.zeros(len(rollout.response), device=model.device) for rollout in rollouts]
    mask = response_mask(rollouts).to(model.device)
    corrected = correct(torch.zeros(mask.shape, device=model.device), mask, "none")
    reference = zeros if config.loss.kl_coef > 0 else None
    batch = make_batch(rollouts, torch.ones(count), zeros, corrected, config.loss, config.rollout.max_tokens, reference)
    view: ReplayKind = "sparse" if config.method in SHADOW_METHODS else "dense"
    smd = config.loss.smd if config.method == "smd" else None
    optimizer.allocate()
    with checkpointed(model, config.optimizer.gradient_checkpointing):
        for _ in range(2):  # moments, collected gradients and activations meet in the second micro-batch
            accumulate(model, batch, range(count), config.loss, view, smd, None, config.optimizer.tokens_per_microbatch)


def longest_rollout(prompt: list[int], tokens: int, config: Config, shape: CacheShape) -> Rollout:
    """Made up, with that many response tokens, its first key evicted so that a shadow pass is a real one."""
    recorder = TraceRecorder(len(prompt), config.kv.interval)
    recorder.record(0, torch.zeros(shape.layers, 1, shape.kv_heads, 1, dtype=torch.long))
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
