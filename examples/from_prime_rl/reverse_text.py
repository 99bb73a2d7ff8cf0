"""The reward of prime-rl's reverse-text environment, in TRL's convention, which sparse-rl uses."""

import re
from difflib import SequenceMatcher


def similarity(completions, answer, **columns):
    """Return how much of the reversed text stands in the tags: difflib's ratio, 0 to 1."""
    return [SequenceMatcher(None, tagged(text), wanted).ratio() for text, wanted in zip(completions, answer, strict=True)]


def tagged(text):
    found = re.search(r"<reversed_text>(.*?)</reversed_text>", text, flags=re.DOTALL)
    return found[1].strip() if found else ""
