"""The engine: a model, a bounded cache, and `generate`. The public face of the sampler."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from ..errors import UserError
from ..kernels.counter_rng import derive
from ..kv.cache import SlotCache
from ..kv.policies import get
from ..kv.settings import KV
from ..models.attention import prepare
from .generation import Generation
from .rollout import Rollout
from .scheduler import Request
from .settings import Sampling
from .stats import Progress, Stats

CHUNK = 8  # steps between looks at the host, at most; a divisor of the interval is taken


class Engine:
    """Samples rollouts of any length from a transformers model while each slot holds at most budget + interval tokens.

    The cache is allocated once and stays. `slots` sequences run at a time; more wait. `prefill_tokens` bounds how many
    prompt tokens pass through the model at once. The model's parameters stay its own: update them between calls.
    """

    def __init__(self, model: PreTrainedModel, kv: KV | None = None, *, slots: int = 64, prefill_tokens: int = 8192):
        self.kv = kv or KV()
        options = {"window": self.kv.window, "sinks": self.kv.sinks} if self.kv.policy != "full" else {}
        self.policy = get(self.kv.policy, **options, **self.kv.options)
        if slots < 1 or prefill_tokens < 1:
            raise UserError(f"slots = {slots} and prefill_tokens = {prefill_tokens} must both be at least 1.")
        self.model, self.slots, self.prefill_tokens = model, slots, prefill_tokens
        self.limits = prepare(model)
        self.chunk = CHUNK
        if self.policy.evicts:
            self.chunk = max(step for step in range(1, CHUNK + 1) if self.kv.interval % step == 0)
        self.stats = Stats()
        self.cache: SlotCache | None = self._allocate(self.kv.capacity) if self.policy.evicts else None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int = 1,
        sampling: Sampling | None = None,
        *,
        seeds: Sequence[int] | None = None,
        record: bool = True,
        progress: Callable[[Progress], None] | None = None,
        allow_beyond_context: bool = False,
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt of token ids, prompt-major.

        `seeds` gives every rollout its seed in place of those derived from `sampling.seed`. `record=False` leaves the
        evictions out (`evicted_at` is then None). `progress` is called between chunks of steps.
        """
        sampling = sampling or Sampling()
        prompts = self._checked(prompts, samples, sampling, seeds, allow_beyond_context)
        requests: list[Request] = []
        for group, prompt in enumerate(prompts):
            for number in range(samples):
                index = len(requests)
                seed = seeds[index] if seeds is not None else derive(sampling.seed, group, number)
                requests.append(Request(index, group, prompt, seed))
        if not self.policy.evicts:
            self._grow(max(map(len, prompts)) + sampling.max_tokens + self.chunk)
        assert self.cache is not None
        generation = Generation(
            self.model,
            self.cache,
            self.policy,
            self.kv,
            sampling,
            requests,
            stop=frozenset(sampling.stop if sampling.stop is not None else self._model_stop_ids()),
            chunk=self.chunk,
            prefill_tokens=self.prefill_tokens,
            record=record,
            progress=progress,
        )
        self.stats = generation.stats
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return generation.run()
        finally:
            self.model.train(was_training)

    def _allocate(self, capacity: int) -> SlotCache:
        ring = self.policy.window if self.policy.uses_queries else 0
        return SlotCache(self.limits.shape, self.slots, capacity, ring)

    def _grow(self, capacity: int) -> None:
        """A dense cache holds what the longest sequence of a call needs."""
        if self.cache is None or self.cache.capacity < capacity:
            self.cache = None  # freed before its successor is allocated
            self.cache = self._allocate(capacity)

    def _model_stop_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.model.config.get_text_config().eos_token_id
        if ids is None:
            return []
        return [ids] if isinstance(ids, int) else list(ids)

    def _checked(self, prompts, samples, sampling, seeds, allow_beyond_context) -> list[list[int]]:
        """All that can be wrong with a request, before any work starts."""
        if isinstance(prompts, str) or any(isinstance(prompt, (str, int)) for prompt in prompts):
            raise UserError("Prompts are lists of token ids: encode text with the model's tokenizer first.")
        if len(prompts) == 0 or samples < 1:
            raise UserError(f"There is nothing to sample: {len(prompts)} prompts with {samples} samples each.")
        if seeds is not None and len(seeds) != len(prompts) * samples:
            raise UserError(
                f"{len(seeds)} seeds do not fit {len(prompts)} prompts with {samples} samples each: give one per rollout."
            )
        prompts = [[int(token) for token in prompt] for prompt in prompts]
        limits = self.limits
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"Prompt {number} is empty: give it at least one token, such as the model's BOS.")
            if min(prompt) < 0 or max(prompt) >= limits.vocab:
                wrong = next(token for token in prompt if not 0 <= token < limits.vocab)
                raise UserError(
                    f"Prompt {number} has token id {wrong}, outside the vocabulary of {limits.vocab}: is it this model's tokenizer?"
                )
            if len(prompt) > self.prefill_tokens:
                raise UserError(
                    f"Prompt {number} has {len(prompt)} tokens, more than prefill_tokens = {self.prefill_tokens}: raise that."
                )
            if self.kv.protect_prompt and self.policy.evicts and self.kv.budget - len(prompt) < self.kv.window + 1:
                raise UserError(
                    f"Prompt {number} has {len(prompt)} tokens and is protected, which leaves fewer than window + 1 = "
                    f"{self.kv.window + 1} of kv.budget = {self.kv.budget}: try --kv.budget {len(prompt) + 64}."
                )
        longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
        room = [
            (limits.context, "context"),
            (limits.sliding_window, "sliding attention window, beyond which its layers forget on their own"),
        ]
        for limit, name in room[allow_beyond_context:]:
            if limit is not None and len(prompts[longest]) + sampling.max_tokens > limit:
                fits = limit - len(prompts[longest])
                remedy = f"max_tokens = {fits} fits" if fits > 0 else "shorten the prompt"
                raise UserError(
                    f"Prompt {longest} has {len(prompts[longest])} tokens and with max_tokens = {sampling.max_tokens} "
                    f"passes the model's {name} of {limit}: {remedy}."
                )
        return prompts
