"""What a second process gives on two cores: python benchmarks/ranks.py --json benchmarks/results/ranks-cpu.json

The embedded model and task, five steps of 128 rollouts, threads pinned: one process on one core, one on both, and two on one each.
Tokens a second are those of the last three steps, sampled tokens over sampling time and learned tokens over the learner's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from sparse_rl.bench.record import environment

FLAGS = ["--method", "sparse_rl", "--steps", "5", "--rollout.prompts-per-step", "16", "--eval.problems", "0"]
ARMS = {"one process, one thread": (1, 1), "one process, two threads": (1, 2), "two processes, one thread each": (2, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    arms = {name: run(*how) for name, how in ARMS.items()}
    found = {**environment("ranks", torch.device("cpu")), "flags": FLAGS, "arms": arms}
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, arm in arms.items():
        print(name, {key: round(value, 3) for key, value in arm.items()})


def run(processes: int, threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *launcher, "-m", "sparse_rl", "train", "quickstart", *FLAGS, "--run-dir", f"{folder}/run"]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()][-3:]
    keys = ("perf/rollout_tokens_per_s", "perf/learner_tokens_per_s", "perf/step_s", "perf/rank_wait")
    return {key: statistics.mean(row[key] for row in rows) for key in keys if key in rows[0]}


if __name__ == "__main__":
    main()
