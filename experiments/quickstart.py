"""Does the quickstart gain, over seeds, and does its budget bite before any training?

    python experiments/quickstart.py --out benchmarks/results/quickstart.json

Runs `sparse-rl train quickstart` once a seed, then samples the held-out problems with the untrained model and every policy
of interest at the quickstart's budget. Run it alone on a machine: the seconds are part of the result.
"""

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # two-sided 95 % quantile of Student's t for that many seeds
DENSE, SPARSE = "eval/arithmetic/pass@1", "eval/arithmetic/pass@1_sparse"


def train(seed, folder):
    started = time.monotonic()
    command = [sys.executable, "-m", "sparse_rl", "train", "quickstart", "--seed", str(seed), "--run-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - started
    row = {"seed": seed, "seconds": round(seconds, 1)}
    for method in ("dense", "sparse_rl"):
        lines = [json.loads(line) for line in (folder / method / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "reward/mean" in line]
        row[method] = {
            "before": lines[0][DENSE],
            "after": lines[-1][DENSE],
            "sparse_before": lines[0].get(SPARSE),
            "sparse_after": lines[-1].get(SPARSE),
            "token_savings": statistics.mean(step["kv/token_savings"] for step in steps),
            "kv_bytes": steps[-1]["kv/peak_bytes"],
            "rejection_rate": statistics.mean(step["sparse/rejection_rate"] for step in steps),
            "engine_noise": max(step["sparse/engine_noise"] for step in steps),
            "reward": [step["reward/mean"] for step in steps],
        }
    print(json.dumps(row), flush=True)
    return row


def gain(rows, method, key=""):
    gains = [100 * (row[method][f"{key}after"] - row[method][f"{key}before"]) for row in rows]
    half = T_95[len(gains)] * statistics.stdev(gains) / math.sqrt(len(gains))
    return {"mean": statistics.mean(gains), "half_width_95": half, "gains": gains}


def before_training(problems):
    import torch

    from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer, replay
    from sparse_rl.config import recipe
    from sparse_rl.data.arithmetic import grade, make_problems
    from sparse_rl.evaluate.statistics import mean_interval
    from sparse_rl.learner.batch import padded, response_mask
    from sparse_rl.learner.correction import correct

    kv = recipe("quickstart")["kv"]
    model, tokenizer = load_model("tiny", dtype="float32", device="cpu"), load_tokenizer("tiny")
    made = make_problems(problems, seed=0, split="test")
    prompts = [tokenizer(problem.prompt).input_ids for problem in made]
    rows = {}
    for policy in ("full", kv["policy"], "random"):
        engine = Engine(model, KV(**{**kv, "policy": policy}), slots=250)
        rollouts = engine.generate(prompts, sampling=Sampling(max_tokens=192))
        texts = tokenizer.batch_decode([rollout.response for rollout in rollouts], skip_special_tokens=True)
        right = [grade(text, problem.answer) for text, problem in zip(texts, made, strict=True)]
        with torch.no_grad():
            old = replay(model, rollouts, "dense")
        log_xi = padded(old) - padded([rollout.logprobs for rollout in rollouts])
        corrected = correct(log_xi, response_mask(rollouts), "paper")
        rows[policy] = {"right": mean_interval(right), "token_savings": engine.stats.token_savings, **corrected.metrics}
        print(policy, json.dumps(rows[policy]), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [train(seed, Path(folder) / str(seed)) for seed in range(args.seeds)]
    gains = {
        "dense": gain(rows, "dense"),
        "sparse_rl": gain(rows, "sparse_rl"),
        "sparse_rl, sparse cache": gain(rows, "sparse_rl", "sparse_"),
    }
    print(json.dumps(gains), flush=True)
    import torch
    import transformers

    record = {
        "experiment": "quickstart",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "runs": rows,
        "gains": gains,
        "before_training": before_training(args.problems),
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
