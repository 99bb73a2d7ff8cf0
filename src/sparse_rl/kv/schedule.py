"""The compaction schedule: when a sequence is compacted, and to how many tokens. Only this module decides that.

A prompt longer than the budget is compressed to the budget at the end of prefill. After every `interval` response tokens, a
slot that holds more than the budget is compacted to it. No layer and head of a slot ever holds more than budget + interval
tokens. If prompts are protected, they are in the prompt store: a slot starts empty, and the budget counts response tokens. The
schedule of a sequence does not depend on other sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import KV
from ..sizes import PAGE_TOKENS


@dataclass(frozen=True)
class Schedule:
    budget: int
    interval: int
    evicts: bool = True
    """False for a dense cache, which is never compacted."""
    stores_prompts: bool = False
    """True if the prompt store holds the prompts: they are protected, or the cache is dense and in pages."""
    quantised: bool = False
    """True if keys and values are stored in 8 or 4 bits."""

    @classmethod
    def of(cls, kv: KV, evicts: bool) -> "Schedule":
        return cls(kv.kept_tokens, kv.interval, evicts, not evicts or kv.protect_prompt, kv.quantised)

    @property
    def pages_responses(self) -> bool:
        """True for a dense cache in pages: all tokens of a sequence but the newest are in the prompt store."""
        return self.stores_prompts and not self.evicts

    def compresses_prompt(self, tokens: int) -> bool:
        return self.evicts and not self.stores_prompts and tokens > self.budget

    def held_after_prefill(self, prompt_tokens: int) -> int:
        """Return the tokens that the slot of a sequence holds after prefill."""
        if self.stores_prompts:
            return prompt_tokens % PAGE_TOKENS if self.pages_responses else 0
        return self.budget if self.compresses_prompt(prompt_tokens) else prompt_tokens

    def scratch_layers(self, prompt_tokens: int, layers: int) -> int:
        """Return the number of layers whose keys of a prompt exist outside slots and pages, if it is prefilled in pieces.

        A prompt that will be compressed is kept whole until its last piece. A stored prompt is read back layer by layer, and so
        is a quantised one.
        """
        if self.compresses_prompt(prompt_tokens):
            return layers + self.quantised
        return int(self.stores_prompts or self.quantised)

    def is_due(self, entered: int, held: int) -> bool:
        """Return whether a slot that holds `held` tokens is due for compaction, after `entered` response tokens have entered
        the cache."""
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
"""Schedule of a cache that is never compacted, and whose slots hold whole sequences."""


def by_length(lengths_of_slots: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    """Group slots by (protected tokens, tokens held) from (slot, protected tokens, tokens held). Slots of equal lengths are
    compacted together."""
    found: dict[tuple[int, int], list[int]] = {}
    for slot, protected, held in lengths_of_slots:
        found.setdefault((protected, held), []).append(slot)
    return found
