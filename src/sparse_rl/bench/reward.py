"""A reward for random weights, in a module that workers import quickly. It tells texts apart and means nothing."""

from typing import Any


def parity(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 2) for text in completions]
