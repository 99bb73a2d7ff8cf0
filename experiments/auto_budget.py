"""Does `kv.budget = "auto"` hold the rejected share while answers grow, and what does it cost in bytes?

    python experiments/auto_budget.py --out benchmarks/results/auto-budget.json

Trains the embedded model on short sums with a reward for worked steps, so that answers grow. The first run has
`kv.budget = "auto"`. The second has the budget that the first began with. Both have the same seed and otherwise the same
options. The temperature is 1.3, because the model hardly varies its answers at 1.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET = 0.02
SUMS = 5
MOST_PAID = 24
OPTIONS = {
    "method": "sparse_rl",
    "model.path": "tiny",
    "model.dtype": "float32",
    "kv.policy": "snapkv",
    "kv.interval": 8,
    "kv.protect-prompt": "false",
    "kv.target-rejected": TARGET,
    "rollout.prompts-per-step": 8,
    "rollout.samples-per-prompt": 8,
    "rollout.max-tokens": 160,
    "rollout.temperature": 1.3,
    "reward.truncated": "grade",
    "reward.workers": 1,
    "optimizer.weight-decay": 0.0,
    "eval.problems": 0,
    "log.rollouts-per-step": 4,
    "log.traces-per-step": 0,
}
KEYS = {
    "budget": "kv/budget",
    "rejected": "sparse/rejection_rate",
    "tail": "sparse/xi_p05_long",
    "p90_tokens": "response/p90_tokens",
    "mean_tokens": "response/mean_tokens",
    "kv_bytes": "kv/peak_bytes",
    "dense_bytes": "kv/dense_bytes",
    "reward": "reward/mean",
    "rebuild_s": "perf/rebuild_s",
}


def worked_steps(prompts, completions, **columns):
    """Pay for every line that adds two numbers correctly, up to 24 of them."""
    return [min(MOST_PAID, _right(text)) / MOST_PAID for text in completions]


def _right(text):
    found = re.findall(r"(\d\d)\+(\d\d)=(\d\d)", text)
    return sum((int(left) + int(right)) % 100 == int(total) for left, right, total in found)


def write_problems(file):
    from sparse_rl.data.arithmetic import make_problems

    rows = [{"prompt": each.prompt, "answer": each.answer} for each in make_problems(512, 0, SUMS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder, problems, budget, args):
    options = OPTIONS | {
        "run-dir": folder,
        "data.train": problems,
        "reward.function": f"{Path(__file__).resolve()}:worked_steps",
        "kv.budget": budget,
        "steps": args.steps,
        "seed": args.seed,
        "optimizer.lr": args.lr,
    }
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    started = time.monotonic()
    with (folder.parent / f"{folder.name}.txt").open("w") as output:
        subprocess.run([sys.executable, "-m", "sparse_rl", "train", *flags], check=True, stdout=output)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    result = {"seconds": round(time.monotonic() - started, 1), "steps": {}}
    for name, key in KEYS.items():
        result["steps"][name] = [row.get(key) for row in steps]
    if (folder / "budget.jsonl").exists():
        result["changes"] = [json.loads(line) for line in (folder / "budget.jsonl").read_text().splitlines()]
    return result


def summary(run):
    steps = run["steps"]
    late = len(steps["rejected"]) // 3
    windows = [statistics.fmean(steps["rejected"][start : start + 8]) for start in range(len(steps["rejected"]) - 7)]
    return {
        "rejected, mean": statistics.fmean(steps["rejected"]),
        "rejected, last third": statistics.fmean(steps["rejected"][-late:]),
        "rejected, worst eight steps": max(windows),
        "steps above twice the target": [step for step, share in enumerate(steps["rejected"], 1) if share > 2 * TARGET],
        "p90 tokens, first and last": [steps["p90_tokens"][0], steps["p90_tokens"][-1]],
        "budget, first and last": [steps["budget"][0], steps["budget"][-1]],
        "KV bytes, mean and largest": [statistics.fmean(steps["kv_bytes"]), max(steps["kv_bytes"])],
        "dense bytes, largest": max(steps["dense_bytes"]),
        "reward, first and last": [steps["reward"][0], steps["reward"][-1]],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1.2e-4)
    parser.add_argument("--folder", type=Path, help="keep the run folders here")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_problems(folder / "problems.jsonl")
        auto = train(folder / "auto", folder / "problems.jsonl", "auto", args)
        start = auto["changes"][0]["after"]
        fixed = train(folder / f"fixed-{start}", folder / "problems.jsonl", start, args)
    import torch
    import transformers

    record = {
        "experiment": "auto-budget",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "options": OPTIONS | {"steps": args.steps, "seed": args.seed, "optimizer.lr": args.lr, "sums": SUMS},
        "summary": {"auto": summary(auto), f"fixed {start}": summary(fixed)},
        "auto": auto,
        "fixed": fixed,
    }
    print(json.dumps(record["summary"], indent=1))
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
