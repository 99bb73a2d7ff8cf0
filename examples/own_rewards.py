"""Rewards of your own, in TRL's convention: lists in, one float (or None) per completion out. No import from sparse_rl.

Named as examples/own_rewards.py:share_right, with --reward.function or in a recipe. Try them: python examples/own_rewards.py
"""

import re

SUM = re.compile(r"(\d\d)\+(\d\d)=(\d\d)")


def share_right(prompts, completions, sums, **columns):
    """Partial credit: the share of a problem's sums that are written and right. `sums` is a column of own_data.jsonl."""
    rewards = []
    for prompt, completion, wanted in zip(prompts, completions, sums, strict=True):
        if wanted is None:  # the row does not say: no verdict, the sample takes no part
            rewards.append(None)
            continue
        written = SUM.findall(prompt + completion)
        right = sum((int(a) + int(b)) % 100 == int(c) for a, b, c in written)
        rewards.append(min(right, wanted) / wanted)
    return rewards


def share_right_and_brief(prompts, completions, sums, **columns):
    """Several rewards in one function (or as a sum: --reward.function "a.py:f + 0.2 * a.py:g"): here a tenth is for stopping after the last sum."""
    shares = share_right(prompts, completions, sums, **columns)
    brief = [completion.count("=") < wanted if wanted else False for completion, wanted in zip(completions, sums, strict=True)]
    return [None if share is None else 0.9 * share + 0.1 * short for share, short in zip(shares, brief, strict=True)]


if __name__ == "__main__":
    prompts = ["3:47+85="] * 3
    completions = ["32 2:85+32=17 1:32+17=49", "32 2:85+32=18 1:32+18=50", ""]
    print(share_right(prompts=prompts, completions=completions, sums=[3, 3, None]))
    print(share_right_and_brief(prompts=prompts, completions=completions, sums=[3, 3, None]))
