r"""Every gold of the data sets against itself and against another row's, and hostile answers, through the pool of graders.

right: gold against `\boxed{gold}`. by_meaning: the same, where the identical text is not looked at, so that what math-verify
cannot read shows. loose: pairs of a row's gold and another's, of different texts, that grade right; what they are stands
beside. python experiments/grading.py --data ../shared/data --out benchmarks/results/grading.json
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

from sparse_rl.data.tasks import TASKS
from sparse_rl.rewards.pool import RewardPool
from sparse_rl.rewards.settings import TASK_REWARDS

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


def graded(function, texts, golds, timeout_s=10.0):
    started = time.perf_counter()
    with RewardPool(function, workers=2, timeout_s=timeout_s) as pool:
        result = pool.grade(["?"] * len(texts), texts, {"answer": golds})
    values = result.values
    counts = {"rows": len(texts), "right": values.count(1.0), "wrong": values.count(0.0), "no_verdict": result.no_verdict}
    counts |= {"timeouts": result.timeouts, "errors": result.errors, "seconds": round(time.perf_counter() - started, 1)}
    return values, counts


def check(path, function):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [(row["id"], row["answer"]) for row in map(json.loads, lines)]
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
        report["sets"][name] = check(args.data / f"{name}.jsonl.gz", function)
        print(name, json.dumps(report["sets"][name])[:1500], flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
