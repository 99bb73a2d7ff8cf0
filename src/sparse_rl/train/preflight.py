"""Run the sampler briefly and the learner's largest pass before the first step, to find most out-of-memory errors early.

The preflight does not run compactions, decode graphs with fewer slots or the evaluation; the plan reserves memory for them.
"""

import torch
from transformers import PreTrainedModel

from ..config import Config
from ..kv.shape import CacheShape
from ..kv.trace import TraceRecorder
from ..learner.batch import make_batch, response_mask
from ..learner.correction import correct
from ..learner.objective import Objective
from ..learner.optimizer import Optimizer, checkpointed
from ..learner.update import accumulate
from ..models.compile import decoder_layers
from ..models.sharded import is_sharded
from ..models.support import prepare
from ..plan import Plan
from ..plan.microbatch import largest_pack, samples_per_computed_prompt
from ..rollout.engine import Engine
from ..rollout.rollout import Rollout
from .memory import out_of_memory


def preflight(
    engine: Engine,
    model: PreTrainedModel,
    optimizer: Optimizer,
    prompt: list[int],
    config: Config,
    plan: Plan | None = None,
) -> None:
    """Run the sampler, then the learner, on a GPU; raise UserError if memory runs out. On a CPU, do nothing.

    The sampler runs first, so that its CUDA graphs already hold their memory when the learner runs. If memory runs out while
    `optimizer.gradient_checkpointing = auto` checkpoints only some layers on one rank, all layers are checkpointed.
    """
    if model.device.type != "cuda":
        return
    try:
        try_sampler(engine, prompt, config)
        if not _learner_fits(model, optimizer, prompt, config, engine.limits.shape):
            optimizer.checkpointed_layers = len(decoder_layers(model))
            torch.cuda.empty_cache()
            try_learner(model, optimizer, prompt, config, engine.limits.shape)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(config, plan) from error
    finally:
        torch.cuda.empty_cache()


def try_sampler(engine: Engine, prompt: list[int], config: Config) -> list[Rollout]:
    """Sample the first tokens and one chunk of decode steps in all slots.

    This changes no results, because sampling depends only on seeds and positions.
    """
    tokens = min(engine.chunk + 1, config.rollout.max_tokens)
    sampling = config.rollout.sampling(config.seed).changed(max_tokens=tokens, stop=())
    samples = min(config.rollout.samples_per_prompt, engine.slots) if engine.schedule.stores_prompts else 1  # as in a step
    prompts, routing = [prompt] * -(-engine.slots // samples), config.model.routing_replay
    return engine.generate(prompts, samples, sampling, record=False, routing=routing)


def try_learner(model: PreTrainedModel, optimizer: Optimizer, prompt: list[int], config: Config, shape: CacheShape) -> None:
    """Run forward and backward over two micro-batches of the longest rollouts, with moments and cache allocated.

    Weights and moments do not change.
    """
    rollouts = largest_microbatch(prompt, config, shape, plain=prepare(model).plain and not shape.states)
    passes = [list(range(len(rollouts)))]
    try:
        # moments, accumulated gradients and activations coexist only in the second micro-batch
        add_gradients(model, optimizer, rollouts, [*passes, *passes], config)
    finally:
        optimizer.clear()


def add_gradients(
    model: PreTrainedModel, optimizer: Optimizer, rollouts: list[Rollout], passes: list[list[int]], config: Config
) -> None:
    """Allocate the moments, then add the gradients of synthetic rollouts, one micro-batch per pass."""
    count = len(rollouts)
    zeros = [torch.zeros(len(rollout.response), device=model.device) for rollout in rollouts]
    mask = response_mask(rollouts).to(model.device)
    corrected = correct(torch.zeros(mask.shape, device=model.device), mask, "none")
    reference = zeros if config.loss.kl_coef > 0 else None
    batch = make_batch(rollouts, torch.ones(count), zeros, corrected, config.loss, config.rollout.max_tokens, reference)
    optimizer.allocate()
    with checkpointed(model, optimizer.checkpointed_layers):
        accumulate(model, batch, passes, Objective.of(config))


def _learner_fits(model: PreTrainedModel, optimizer: Optimizer, prompt: list[int], config: Config, shape: CacheShape) -> bool:
    """Run `try_learner`. Return False if memory runs out and more layers can be checkpointed; else raise."""
    try:
        try_learner(model, optimizer, prompt, config, shape)
    except torch.OutOfMemoryError:
        more = optimizer.checkpointed_layers < len(decoder_layers(model))
        if config.optimizer.gradient_checkpointing != "auto" or not more or is_sharded(model):
            raise
        return False
    return True


def largest_microbatch(prompt: list[int], config: Config, shape: CacheShape, *, plain: bool) -> list[Rollout]:
    """Return the synthetic rollouts of the plan's largest micro-batch. Rollouts that do not share a prompt have different
    ones, of equal length. A model is `plain` if it has no soft caps, sinks or recurrent layers."""
    rollouts, group = [], samples_per_computed_prompt(len(prompt), config, plain=plain)
    for index, tokens in enumerate(largest_pack(len(prompt), config, plain=plain).lengths):
        turn = index // group % len(prompt)
        rollouts.append(longest_rollout(prompt[turn:] + prompt[:turn], tokens, config, shape))
    return rollouts


def longest_rollout(prompt: list[int], tokens: int, config: Config, shape: CacheShape) -> Rollout:
    """Return a synthetic rollout with `tokens` response tokens and one eviction, so that the shadow pass applies a mask."""
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
