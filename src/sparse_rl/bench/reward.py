"""Reward for benchmarks with random weights, in a module that workers import quickly. It distinguishes texts but has no
meaning."""

from typing import Any


def parity(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 2) for text in completions]
