"""`kv`: options of the KV cache. All sizes are tokens per layer and kv head of one sequence."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import UserError
from ..format import agreeing, counted
from .section import Section

LARGE_PROMPT = 0.5
"""Share of the budget from which a typical prompt is worth a warning."""
BUILT_IN_POLICIES = ("full", "rkv", "snapkv", "streaming", "tova", "knorm", "keydiff", "triattention", "expected", "random")
"""Names of the built-in policies. Their classes, which import torch, are in kv.policies."""
PREDICTS_QUERIES = ("triattention", "expected")
"""Policies that score keys for future queries, with statistics of the model in place of recent queries."""
SCORING_WINDOW = 8
"""`window` of all other policies, if it is auto."""

LEAST_AUTO = 16
"""Smallest budget that auto tries with a small window and few sinks."""
AUTO_MULTIPLE = 8
"""Budgets that auto tries are multiples of this number of tokens."""


def is_import_path(policy: str) -> bool:
    """Return whether `kv.policy` is the path of a class, package.module:Class or package.module.Class. The other names are those
    of built-in policies and of entry points."""
    return "." in policy or ":" in policy


class KV(Section):
    """Size and policy of the KV cache."""

    section: ClassVar[str] = "kv"

    policy: str = Field(
        "triattention",
        description=f"Eviction policy: {' '.join(BUILT_IN_POLICIES)}, or package.module:Class of a custom policy.",
    )
    budget: int | Literal["auto"] = Field(
        512,
        description=(
            "Response tokens kept by a compaction; prompt tokens count too if protect_prompt is false. auto: the run measures and "
            "adjusts it."
        ),
    )
    target_rejected: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="Share of rejected rollouts that budget = auto holds; alerts.xi_p05 limits long responses.",
    )
    interval: int = Field(128, description="Response tokens between compactions; a slot holds up to budget + interval tokens.")
    window: int | Literal["auto"] = Field(
        "auto",
        description=(
            "Number of last tokens that are never evicted; policies such as rkv score with their queries. auto: "
            f"half of budget for {' and '.join(PREDICTS_QUERIES)}, {SCORING_WINDOW} for others."
        ),
    )
    sinks: int = Field(4, ge=0, description="Number of first tokens that are never evicted.")
    protect_prompt: bool = Field(
        True,
        description="Never evict prompt tokens, store them once for all samples of a prompt, and let budget count the response.",
    )
    dtype: Literal["auto", "8bit", "4bit"] = Field(
        "auto",
        description="Storage of keys and values: auto (the model's dtype), 8bit (half of bf16) or 4bit (0.28 to 0.38 of it, by head size).",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            'Policy options, such as {"mix": 0.2}: kernel mix threshold (rkv), kernel form pool (snapkv), normalize '
            "(triattention), future epsilon (expected)."
        ),
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> "KV":
        if self.interval < 1:
            raise ValueError(f"kv.interval = {self.interval} is invalid: it must be at least 1. Try 128.")
        if self.window != "auto" and self.window < 0:
            raise ValueError(f"kv.window = {self.window} is invalid: it must be at least 0, or auto.")
        if self.budget == "auto":
            if self.policy == "full":
                raise ValueError(
                    "kv.budget = auto and kv.policy = full contradict each other: full evicts nothing. Set kv.policy = "
                    "triattention, or remove kv.budget."
                )
            return self
        if self.budget < 1:
            raise ValueError(f"kv.budget = {self.budget} is invalid: it must be at least 1, or auto.")
        if self.policy != "full" and self.budget < self.least_budget:
            raise ValueError(f"kv.budget = {self.budget} {self.too_small('--kv.budget {}')}")
        return self

    def remark(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> str | None:
        """Return a message if the budget is never filled by these prompts and responses, or if prompts fill most of it and may be
        evicted; else None."""
        if told := self.never_evicts(max(map(len, prompts), default=0), max_tokens):
            return told
        if self.policy == "full" or self.budget == "auto" or self.protect_prompt or not prompts:
            return None
        lengths = sorted(map(len, prompts))
        typical, most = lengths[len(lengths) // 2], lengths[-1]
        enough = "kv.protect_prompt = true, with which kv.budget counts response tokens alone"
        if longer := sum(length > self.budget for length in lengths):
            return (
                f"{longer:,} of {counted(len(prompts), 'prompt')} {agreeing(longer, 'is', 'are')} longer than "
                f"kv.budget = {self.budget} (up to {most:,} tokens), so part of each is evicted before the answer begins: set {enough}, or skip these prompts with "
                f"--data.max-prompt-tokens {self.budget}."
            )
        if typical > LARGE_PROMPT * self.budget:
            return (
                f"A typical prompt fills {typical / self.budget:.0%} of kv.budget = {self.budget} and is evicted like other "
                f"tokens: set {enough} if answers need the whole prompt."
            )
        return None

    def never_evicts(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Return a message if no sequence of at most these lengths fills the budget at a compaction; else None. For auto, this is
        the smallest budget that is tried."""
        if self.policy == "full":
            return None
        held = self.held_at_last_compaction(prompt_tokens, max_tokens, self.interval)
        if held > self.smallest_tried:
            return None
        before, what = (0, "a response has") if self.protect_prompt else (prompt_tokens, "a prompt and its response have")
        longest, interval = before + max_tokens, self.evicting_interval(prompt_tokens, max_tokens)
        if interval is None:
            most = self.held_at_last_compaction(prompt_tokens, max_tokens, 1)
            when = f"{longest:,} tokens" if longest <= self.smallest_tried else f"{most:,} tokens at a compaction"
            if self.budget == "auto":
                lower = ", lower kv.window or kv.sinks" if self.least_auto > LEAST_AUTO else ""
                return (
                    f"kv.budget = auto tries budgets from {self.least_auto:,} tokens on, and none evicts: {what} at most {when}. "
                    f"Raise rollout.max_tokens to {self.shortest_evicted(prompt_tokens):,} or more{lower}, or train dense."
                )
            return (
                f"kv.budget = {self.budget} never evicts: {what} at most {when}. Each slot still allocates {self.capacity:,} tokens. "
                "Lower kv.budget (docs/choosing-a-budget.md), or use a dense cache."
            )
        when = f"{what} at most {held:,} tokens at the last compaction"
        if max_tokens - 2 < self.interval:
            when = f"a response of {max_tokens:,} tokens ends before the first compaction"
        return (
            f"kv.budget = {self.budget} with kv.interval = {self.interval} never evicts: {when}. Lower kv.interval, for "
            f"example to {interval}, or use a dense cache."
        )

    def held_at_last_compaction(self, prompt_tokens: int, max_tokens: int, interval: int) -> int:
        """Return the tokens that the budget counts at the last compaction of a sequence of these lengths.

        The last token does not enter the cache. When the one before it enters, the sequence ends and is not compacted.
        """
        entered = max(0, max_tokens - 2) // interval * interval
        return entered + (0 if self.protect_prompt else prompt_tokens)

    def shortest_evicted(self, prompt_tokens: int) -> int:
        """Return the tokens of the shortest response to a prompt of this length that fills the budget at a compaction."""
        missing = self.smallest_tried - (0 if self.protect_prompt else prompt_tokens)
        return (missing // self.interval + 1) * self.interval + 2

    def evicting_interval(self, prompt_tokens: int, max_tokens: int) -> int | None:
        """Return the largest interval with which a sequence of these lengths fills the budget at a compaction; None if none does.

        It exceeds neither the present interval nor a sixteenth of the response.
        """
        for interval in range(min(self.interval, max(1, max_tokens // 16)), 0, -1):
            if self.held_at_last_compaction(prompt_tokens, max_tokens, interval) > self.smallest_tried:
                return interval
        return None

    @property
    def smallest_tried(self) -> int:
        """`budget` as a number. If it is auto, the smallest budget that is tried."""
        return self.least_auto if self.budget == "auto" else self.budget

    @property
    def quantised(self) -> bool:
        """True if keys and values are stored in 8 or 4 bits."""
        return self.dtype != "auto"

    @property
    def has_custom_policy(self) -> bool:
        """True if the policy is not built in. It may read queries, and it may refuse quantised keys."""
        return self.policy not in BUILT_IN_POLICIES

    @property
    def is_sparse(self) -> bool:
        """True if the sampler does not see every key as the learner computes it: keys are evicted, quantised, or both."""
        return self.policy != "full" or self.quantised

    @property
    def remedy(self) -> str:
        """Return the change of options that lowers the mismatch of this cache, for messages."""
        if self.policy == "full":
            return "use more bits (kv.dtype)"
        return "lower kv.target_rejected or rollout.max_tokens" if self.budget == "auto" else "raise kv.budget"

    @property
    def label(self) -> str:
        """Name of the cache in tables, such as triattention 512+128 or full 4bit."""
        size = "" if self.policy == "full" else f" {self.budget}+{self.interval}"
        return f"{self.policy}{size}{f' {self.dtype}' if self.quantised else ''}"

    @property
    def stores_prompts(self) -> bool:
        """True if prompts are in the prompt store, and not in the slots."""
        return self.protect_prompt and self.policy != "full"

    @property
    def recent(self) -> int:
        """`window` as a number. If it follows a budget that is auto, half of the smallest budget that is tried."""
        if self.window != "auto":
            return self.window
        if not self.window_follows_budget:
            return SCORING_WINDOW
        return self.smallest_tried // 2

    @property
    def window_follows_budget(self) -> bool:
        return self.window == "auto" and self.policy in PREDICTS_QUERIES

    @property
    def least_budget(self) -> int:
        """Smallest valid budget: one more than window + sinks. Independent of `budget`, which may be auto."""
        return 1 + (2 * self.sinks if self.window_follows_budget else self.recent + self.sinks)

    def too_small(self, fix: str) -> str:
        """Return the end of the message about a budget that is too small. `fix` sets the budget `{}`."""
        forced = self.least_budget - 1
        return f"is too small: it must exceed window + sinks = {forced}. Try {fix.format(max(64, 4 * forced))}."

    @property
    def least_auto(self) -> int:
        """Smallest budget that auto tries: twice the window + sinks of the smallest valid budget, and at least LEAST_AUTO. It is
        rounded up, as all budgets that auto tries."""
        return max(LEAST_AUTO, math.ceil(2 * (self.least_budget - 1) / AUTO_MULTIPLE) * AUTO_MULTIPLE)

    @property
    def kept_tokens(self) -> int:
        """`budget` as a number. Raise UserError if it is auto and nothing has set it."""
        if self.budget == "auto":
            raise UserError(
                "kv.budget = auto works only in train and in eval --mismatch: set a number of tokens, such as --kv.budget 512."
            )
        return self.budget

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a layer and head of a slot holds after prefill."""
        return self.kept_tokens + self.interval
