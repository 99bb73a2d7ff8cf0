"""A graded reward: the share of instruction constraints a response meets, each checked by code. No import from sparse_rl.

The data has a column `constraints`, a list of objects such as {"kind": "max_words", "value": 50}. Use it as
--reward.function examples/constraints_reward.py:share_met, or beside another reward:
--reward.function "math_answer + 0.2 * examples/constraints_reward.py:share_met". Where answers must be long, share_met_at_length.
Try it: python examples/constraints_reward.py
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


def share_met_at_length(prompts, completions, constraints, **columns):
    """The same, times how much there is to it: different words / the `min_words` that are asked for, 1 at most.

    A share can be gamed: trained on `share_met`, a model gave up the one constraint that takes a whole answer, `min_words`,
    and met the others in a line or two (docs/evidence.md, G).
    """
    rewards = []
    shares = share_met(prompts, completions, constraints)
    for completion, wanted, share in zip(completions, constraints, shares, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        least = max((each["value"] for each in wanted or [] if each["kind"] == "min_words"), default=0)
        length = min(1.0, len(set(words(text.lower()))) / least) if least else 1.0
        rewards.append(None if share is None else share * length)
    return rewards


if __name__ == "__main__":
    wanted = [{"kind": "max_words", "value": 5}, {"kind": "contains", "value": "KV"}, {"kind": "ends_with", "value": "."}]
    texts = ["A bounded KV cache.", "A cache that is bounded, however long the rollout.", "No."]
    print(share_met(prompts=["Describe it."] * 3, completions=texts, constraints=[wanted, wanted, None]))
