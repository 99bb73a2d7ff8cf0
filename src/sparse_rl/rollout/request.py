"""Requests of `generate`: one per rollout, validated before sampling starts. Also samples their first tokens."""

# n requests, V vocabulary

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import Sampling
from ..errors import PromptError, UserError
from ..format import counted
from ..kernels.counter_rng import derive_all, uniform
from ..kv.prompt_store import PromptStore
from ..models.support import AttentionLimits
from ..sizes import FIRST_TOKENS
from .sampling import sample


@dataclass(frozen=True)
class Request:
    index: int
    """Index in the list that `generate` returns."""
    group: int
    """Index of the prompt. Requests of one group are prefilled together."""
    prompt: list[int]
    seed: int
    max_tokens: int
    record: bool
    """True if the evictions of the rollout are recorded."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits that the model, the cache and the engine set for requests."""

    model: AttentionLimits
    store: PromptStore | None = None
    """Prompt store, or pool of a dense cache, that keeps its size; None if it grows with the calls."""

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        sampling: Sampling,
        seeds: Sequence[int] | None,
        limits: Sequence[int] | None,
        record: bool | Collection[int],
        *,
        allow_beyond_context: bool,
    ) -> list[Request]:
        """Return the validated requests, with all samples of a prompt together."""
        prompts = [prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt for prompt in prompts]
        if any(isinstance(prompt, (str, int, float)) for prompt in prompts):
            raise UserError("Prompts must be lists of token ids: encode text with the model's tokenizer first.")
        asked = f"{counted(len(prompts), 'prompt')} with {counted(samples, 'sample')} each"
        if len(prompts) == 0 or samples < 1:
            raise UserError(f"Nothing to sample: {asked}. Both must be at least 1.")
        if seeds is not None and (len(seeds) != len(prompts) * samples or not all(0 <= seed < 2**63 for seed in seeds)):
            raise UserError(
                f"{counted(len(seeds), 'seed')} given for {asked}: pass one seed per rollout, from 0 to 2**63 - 1."
            )
        if limits is not None and (len(limits) != len(prompts) * samples or min(limits) < 1):
            raise UserError(f"{counted(len(limits), 'limit')} given for {asked}: pass one limit of at least 1 per rollout.")
        for number, prompt in enumerate(prompts):
            self.check_prompt(prompt, sampling, allow_beyond_context=allow_beyond_context, name=f"Prompt {number}")
        if seeds is None:
            seeds = derive_all(sampling.seed, len(prompts), samples)
        if limits is None:
            limits = [sampling.max_tokens] * len(seeds)
        recorded = range(len(seeds)) if record is True else record or ()
        lists = [list(prompt) for prompt in prompts]
        return [
            Request(index, index // samples, lists[index // samples], seed, min(limit, sampling.max_tokens), index in recorded)
            for index, (seed, limit) in enumerate(zip(seeds, limits, strict=True))
        ]

    def check_prompt(
        self, prompt: Sequence[int], sampling: Sampling, *, allow_beyond_context: bool = False, name: str = "The prompt"
    ) -> None:
        """Raise PromptError if the prompt has invalid token ids or leaves no room for a response."""
        model, tokens = self.model, len(prompt)
        if not tokens:
            raise PromptError("is empty", "pass at least one token, such as the model's BOS", prompt=name)
        ids = np.asarray(prompt)
        if ids.ndim != 1:
            raise PromptError("is nested", "pass one flat list of token ids per prompt", prompt=name)
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= model.vocab:
            wrong = (token for token in prompt if type(token) is not int or not 0 <= token < model.vocab)
            raise PromptError(
                f"has token id {next(wrong, prompt[0])}, outside the vocabulary of {model.vocab}",
                "encode it with this model's tokenizer",
                prompt=name,
            )
        context = model.positions if allow_beyond_context else model.context
        for limit, what in ((model.sliding_window, "attention window or chunk"), (context, "context")):
            if limit is not None and tokens + sampling.max_tokens > limit:
                fits = limit - tokens if limit > tokens else None
                raise PromptError(
                    f"has {tokens} tokens, and with max_tokens = {sampling.max_tokens} exceeds the model's {what} of {limit}",
                    f"max_tokens = {fits} fits" if fits else "shorten the prompt",
                    prompt=name,
                    fits=fits,
                )
        if self.store is None or tokens <= (room := self.store.longest_prompt(sampling.max_tokens)):
            return
        if self.store.responses:
            raise PromptError(
                f"has {tokens} tokens. With max_tokens = {sampling.max_tokens}, the reserved dense cache holds prompts of at most "
                f"{max(0, room)}",
                "reserve more memory with engine.reserve_dense, or lower max_tokens",
                prompt=name,
            )
        raise PromptError(
            f"has {tokens} tokens, more than the reserved prompt store can hold ({room})",
            f"reserve it for {tokens} tokens, as in engine.reserve_prompts({tokens}, prompts=1, samples=1)",
            prompt=name,
        )

    def most_prompt_tokens(self, sampling: Sampling) -> int | None:
        """Return the longest prompt in tokens that `check_prompt` accepts; None if its length is not limited."""
        limits = (self.model.sliding_window, self.model.context)
        fitting = [limit - sampling.max_tokens for limit in limits if limit is not None]
        if self.store is not None:
            fitting.append(self.store.longest_prompt(sampling.max_tokens))
        return min(fitting, default=None)


def first_tokens(requests: list[Request], logits_nV: Tensor, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Sample the first tokens [n, 1] of requests from the last logits of their prompts. Return them and their log-probs."""
    seeds = torch.tensor([request.seed for request in requests], device=logits_nV.device)
    positions = torch.tensor([len(request.prompt) for request in requests], device=logits_nV.device)
    drawn = [
        sample(logits, numbers, sampling)
        for logits, numbers in zip(logits_nV.split(FIRST_TOKENS), uniform(seeds, positions).split(FIRST_TOKENS), strict=True)
    ]
    tokens, logprobs = (torch.cat(each)[:, None].cpu() for each in zip(*drawn, strict=True))
    return tokens.numpy(), logprobs.float().numpy()
