"""Try the reward on a reference answer before sampling starts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..data.examples import Example
from .pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class GoldCheck:
    """Result of grading a problem's gold answer as the completion, or an empty completion if the problem has no answer."""

    gold: str | None
    value: float | None
    fault: str
    """Error of the reward; empty if it succeeded."""

    @property
    def sentence(self) -> str:
        if self.gold is not None:
            return f"The reward fails on the first reference answer ({self.fault}): fix reward.function."
        what = "an empty text, because the data has no answer column"
        return f"The reward fails on {what} ({self.fault}): set data.answer_column, or fix reward.function."


def try_on_gold(pool: RewardPool, example: Example, tokenizer: "PreTrainedTokenizerBase | None" = None) -> GoldCheck:
    """Grade one gold answer before sampling starts. Without a tokenizer, the bytes of the text stand in for token ids."""
    text = example.answer or ""
    ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer else list(text.encode())
    columns = {name: [value] for name, value in example.columns.items()}
    columns |= {"finish": ["stop"], "completion_ids": [ids], "in_thought": [False]}
    graded = pool.grade([example.prompt], [text], columns)
    fault = (graded.first_error or "over reward.timeout_s") if graded.errors + graded.timeouts else ""
    return GoldCheck(example.answer, graded.values[0], fault)
