"""The compaction schedule: when a sequence is compacted, and to how many tokens. Only this module decides that.

A prompt longer than the budget is compressed to the budget at the end of prefill. After every `interval` response tokens, a
sequence that holds more than the budget is compacted to it. No layer and head of a sequence ever holds more than budget +
interval tokens. The schedule of a sequence does not depend on other sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import KV


@dataclass(frozen=True)
class Schedule:
    budget: int
    interval: int
    evicts: bool = True
    """False for a dense cache, which is never compacted."""
    protect_prompt: bool = False

    @classmethod
    def of(cls, kv: KV, evicts: bool) -> "Schedule":
        return cls(kv.budget, kv.interval, evicts, kv.protect_prompt)

    def compresses_prompt(self, tokens: int) -> bool:
        return self.evicts and tokens > self.budget

    def held_after_prefill(self, prompt_tokens: int) -> int:
        return self.budget if self.compresses_prompt(prompt_tokens) else prompt_tokens

    def is_due(self, entered: int, held: int) -> bool:
        """Return whether a sequence that holds `held` tokens is due for compaction, after `entered` response tokens have
        entered the cache."""
        return self.evicts and entered % self.interval == 0 and held > self.budget

    def steps_between_checks(self, longest: int) -> int:
        """Return the largest divisor of the interval that is at most `longest`, so that no compaction is due between two
        checks. Without evictions, return `longest`."""
        if not self.evicts:
            return longest
        return max(steps for steps in range(1, longest + 1) if self.interval % steps == 0)


DENSE = Schedule(budget=0, interval=1, evicts=False)
"""Schedule of a cache that is never compacted."""


def by_length(held_of_slots: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Group slots by the number of tokens they hold. Slots of equal length are compacted together."""
    found: dict[int, list[int]] = {}
    for slot, held in held_of_slots:
        found.setdefault(held, []).append(slot)
    return found
