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

    def steps_to_boundary(self, step: int, longest: int) -> int:
        """Return the decode steps to run after `step` before the host looks at the slots again, at most `longest`.

        The boundaries repeat with the interval, and sequences start only at boundaries. So every compaction falls on one.
        """
        return min(longest, self.interval - step % self.interval) if self.evicts else longest

    def steps_into_interval(self, step: int) -> int:
        """Return the steps since the boundaries last repeated."""
        return step % self.interval if self.evicts else step


DENSE = Schedule(budget=0, interval=1, evicts=False)
"""Schedule of a cache that is never compacted."""


def by_length(held_of_slots: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Group slots by the number of tokens they hold. Slots of equal length are compacted together."""
    found: dict[int, list[int]] = {}
    for slot, held in held_of_slots:
        found.setdefault(held, []).append(slot)
    return found
