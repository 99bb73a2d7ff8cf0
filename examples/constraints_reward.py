"""A graded reward: the share of instruction constraints a response meets, each checked by code. No import from sparse_rl.

The data has a column `constraints`, a list of objects such as {"kind": "max_words", "value": 50}. Use it as
--reward.function examples/constraints_reward.py:share_met, or beside another reward:
--reward.function "math_answer + 0.2 * examples/constraints_reward.py:share_met". Try it: python examples/constraints_reward.py
"""

import json
import re


def words(text):
    return re.findall(r"\w+", text)


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


CHECKS = {
    "max_words": lambda text, value: len(words(text)) <= value,
    "min_words": lambda text, value: len(words(text)) >= value,
    "contains": lambda text, value: value.lower() in text.lower(),
    "avoids": lambda text, value: value.lower() not in text.lower(),
    "starts_with": lambda text, value: text.strip().startswith(value),
    "ends_with": lambda text, value: text.strip().endswith(value),
    "bullets": lambda text, value: len(re.findall(r"^\s*[-*] ", text, re.MULTILINE)) == value,
    "lower_case": lambda text, value: (text == text.lower()) == value,
    "json": lambda text, value: is_json(text) == value,
}


def share_met(prompts, completions, constraints, **columns):
    """1 for all constraints, 0.5 for half of them; no verdict for a row without any. An unknown kind raises."""
    rewards = []
    for completion, wanted in zip(completions, constraints, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        met = [CHECKS[constraint["kind"]](text, constraint["value"]) for constraint in wanted or []]
        rewards.append(sum(met) / len(met) if met else None)
    return rewards


if __name__ == "__main__":
    wanted = [{"kind": "max_words", "value": 5}, {"kind": "contains", "value": "KV"}, {"kind": "ends_with", "value": "."}]
    texts = ["A bounded KV cache.", "A cache that is bounded, however long the rollout.", "No."]
    print(share_met(prompts=["Describe it."] * 3, completions=texts, constraints=[wanted, wanted, None]))
