r"""Every gold of the data sets against itself and against another row's, and hostile answers, through the pool of graders.

right: gold against `\boxed{gold}`. by_meaning: the same, where the identical text is not looked at, so that what math-verify
cannot read shows. loose: pairs of a row's gold and another's, of different texts, that grade right; what they are stands
beside. named: `x = gold` and the like, and what math-verify alone says to them. cut: the worked solutions of GSM8K, whole and
cut at a random word. python experiments/grading.py --data ../shared/data --out benchmarks/results/grading.json
"""

import argparse
import datetime
import gzip
import json
import os
import platform
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path

from sparse_rl.config import TASK_REWARDS, TASKS
from sparse_rl.rewards.answers import plain
from sparse_rl.rewards.pool import RewardPool

FILES = {
    origin.file.removesuffix(".jsonl.gz"): TASK_REWARDS[task.name]
    for task in TASKS.values()
    for origin in (task.train, task.test)
    if origin is not None and origin.file
}


def by_meaning(prompts, completions, answer, **columns):
    """A reward: is the answer's meaning its own, without a look at the text?"""
    from sparse_rl.rewards.math import gold_of, gold_values, verify

    verdicts = []
    for gold in map(gold_of, answer):
        values = gold_values(gold.text)
        same = any(verify(value, value, timeout_seconds=None) for value in values)
        verdicts.append(float(gold.number is not None or same) if gold.text.strip() else None)
    return verdicts


def by_math_verify(prompts, completions, answer, **columns):
    """A reward: what math-verify says without us."""
    from math_verify import parse, verify

    pairs = [
        (parse(f"\\boxed{{{gold}}}", parsing_timeout=None), parse(text, parsing_timeout=None))
        for gold, text in zip(answer, completions, strict=True)
    ]
    return [float(verify(*pair, timeout_seconds=None)) for pair in pairs]


def graded(function, texts, golds, timeout_s=10.0, finish="stop"):
    started = time.perf_counter()
    with RewardPool(function, workers=2, timeout_s=timeout_s) as pool:
        result = pool.grade(["?"] * len(texts), texts, {"answer": golds, "finish": [finish] * len(texts)})
    values = result.values
    counts = {"rows": len(texts), "right": values.count(1.0), "wrong": values.count(0.0), "no_verdict": result.no_verdict}
    counts |= {"timeouts": result.timeouts, "errors": result.errors, "seconds": round(time.perf_counter() - started, 1)}
    return values, counts


def check(path, function):
    rows = [(row["id"], row["answer"]) for row in rows_of(path)]
    golds = [gold for _, gold in rows]
    values, itself = graded(function, [f"\\boxed{{{gold}}}" for gold in golds], golds)
    report = {"itself": itself | {"not_right": [name for (name, _), value in zip(rows, values, strict=True) if value != 1.0]}}
    if function == "math_answer":
        values, meaning = graded(f"{__file__}:by_meaning", [""] * len(golds), golds)
        report["by_meaning"] = meaning | {
            "not_right": [name for (name, _), value in zip(rows, values, strict=True) if value == 0.0]
        }
    some = [gold for gold in golds if gold]
    others = random.Random(0).sample(some, len(some))
    pairs = [(gold, other) for gold, other in zip(some, others, strict=True) if gold != other]
    values, shuffled = graded(function, [f"\\boxed{{{other}}}" for _, other in pairs], [gold for gold, _ in pairs])
    report["shuffled"] = shuffled | {
        "loose": [pair for pair, value in zip(pairs, values, strict=True) if value],
        "undecided": [pair for pair, value in zip(pairs, values, strict=True) if value is None],
    }
    return report


NAMES = ("x", "m + n", "f(2)", "\\text{Area}", "a_{10}", "\\angle ABC", "100m + n")
NAMED_ROWS = 1000


def named(path, function):
    """`name = gold` of the rows whose gold is a number in figures, and `name = another row's`."""
    golds = [row["answer"] for row in rows_of(path)][:NAMED_ROWS]
    golds = [gold for gold in golds if plain(gold)]
    others = random.Random(0).sample(golds, len(golds))
    pairs = [(gold, other) for gold, other in zip(golds, others, strict=True) if plain(gold).value != plain(other).value]
    report = {}
    for title, judge in (("ours", function), ("math_verify", f"{__file__}:by_math_verify")):
        texts = [f"\\boxed{{{NAMES[row % len(NAMES)]} = {gold}}}" for row, gold in enumerate(golds)]
        _, right = graded(judge, texts, golds)
        texts = [f"\\boxed{{{NAMES[row % len(NAMES)]} = {other}}}" for row, (_, other) in enumerate(pairs)]
        values, wrong = graded(judge, texts, [gold for gold, _ in pairs])
        loose = [pair for pair, value in zip(pairs, values, strict=True) if value]
        report[title] = {"gold": right, "another": wrong | {"loose": loose}}
    return report


def cut(path):
    """The last number of a worked solution, where it is whole, and where it was cut at a word before the last."""
    rows, draw = rows_of(path), random.Random(0)
    golds, texts = [row["answer"] for row in rows], [row["solution"] for row in rows]
    parts = [" ".join(words[: draw.randrange(1, len(words))]) for words in map(str.split, texts)]
    return {
        "whole": graded("integer_answer", texts, golds)[1],
        "cut": graded("integer_answer", parts, golds, finish="length")[1],
        "cut_and_taken_for_whole": graded("integer_answer", parts, golds)[1],
    }


def rows_of(path):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def hostile():
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from hostile import ENDLESS, wrong

    answers = wrong() + ENDLESS
    _, counts = graded("math_answer", [text for text, _ in answers], [gold for _, gold in answers])
    return counts | {"expected": {"wrong": len(answers) - len(ENDLESS), "timeouts": len(ENDLESS)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    packages = ("math-verify", "latex2sympy2_extended", "sympy")
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()} | {name: version(name) for name in packages},
        "workers": 2,
        "timeout_s": 10.0,
        "seed": 0,
        "hostile": hostile(),
        "sets": {},
    }
    print("hostile", report["hostile"], flush=True)
    for name, function in FILES.items():
        path = args.data / f"{name}.jsonl.gz"
        report["sets"][name] = check(path, function) | {"named": named(path, function)}
        print(name, json.dumps(report["sets"][name])[:1500], flush=True)
    report["cut"] = cut(args.data / "gsm8k-train.jsonl.gz")
    print("cut", report["cut"], flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
