"""What each method makes of sparse rollouts at a budget that hurts, on the embedded task, over seeds.

    python experiments/methods.py run --out benchmarks/results/methods.json --parallel 2
    python experiments/methods.py table benchmarks/results/methods.json
    python experiments/methods.py plot benchmarks/results/methods.json --out docs/methods.svg
    python experiments/methods.py run --presets --out benchmarks/results/presets.json --parallel 2

Every arm has the same seeds, problems, learning rate and number of steps; only the method, and for `sparse_rl` the
correction, differ. `run` starts one process a run, on the CPU with one thread each, and keeps every metric of every step; what is
in its file is not run again. `--presets` are the other corrections.
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARMS = {
    "dense": ["--method", "dense"],
    "naive": ["--method", "naive"],
    "sparse_rl paper": ["--method", "sparse_rl", "--correction.preset", "paper"],
    "sparse_rl released": ["--method", "sparse_rl", "--correction.preset", "released"],
    "smd": ["--method", "smd"],
    "on_policy_sparse": ["--method", "on_policy_sparse"],
}
PRESETS = {
    preset: ["--method", "sparse_rl", "--correction.preset", preset]
    for preset in ("reject_only", "reweight_only", "tis", "icepop", "sequence_mask", "geometric_mask")
} | {"paper, veto 0.01": ["--method", "sparse_rl", "--correction.preset", "paper", "--correction.veto", "0.01"]}
DENSE, SPARSE = "eval/arithmetic/pass@1", "eval/arithmetic/pass@1_sparse"
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # two-sided 95 % quantile of Student's t for that many seeds


def run(args):
    import torch
    import transformers

    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(each["arm"], each["seed"]) for each in runs}
    jobs = [
        (arm, seed) for seed in range(args.seeds) for arm in (PRESETS if args.presets else ARMS) if (arm, seed) not in done
    ]
    record = {
        "experiment": "methods",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, CPU, {args.parallel} runs at a time with one thread each",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "flags": common(args),
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.parallel) as pool:
        for job in [pool.submit(one_run, Path(folder), *job, args) for job in jobs]:
            runs.append(job.result())
            args.out.write_text(json.dumps(record) + "\n")
    table(args.out)


def common(args):
    return [
        *("--compare", "[]", "--steps", str(args.steps), "--model.device", "cpu", "--eval.problems", str(args.problems)),
        *("--kv.budget", str(args.budget), "--kv.interval", str(args.budget // 4), "--optimizer.lr", str(args.lr)),
        *("--rollout.prompts-per-step", str(args.prompts), "--log.rollouts-per-step", "0"),
    ]


def one_run(folder, arm, seed, args):
    run_dir = folder / f"{re.sub('[^a-z0-9_]+', '-', arm)}-{seed}"
    command = [sys.executable, "-m", "sparse_rl", "train", "quickstart", "--run-dir", str(run_dir), "--seed", str(seed)]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *common(args), *(ARMS | PRESETS)[arm]],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{arm}, seed {seed}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [{key: float(f"{value:.4g}") for key, value in line.items()} for line in lines]
    print(f"{arm}, seed {seed}: {seconds:.0f} s, dense {steps[0][DENSE]:.3f} -> {steps[-1][DENSE]:.3f}", flush=True)
    return {"arm": arm, "seed": seed, "seconds": round(seconds, 1), "steps": steps}


def mean_of(values):
    """Mean with the half-width of its 95 % interval over seeds."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def table(path):
    runs = json.loads(path.read_text())["runs"]
    print("| arm | dense before | dense after | gain | sparse before | sparse after | rejected | ξ p05 | seconds a run |")
    print("|---|---|---|---|---|---|---|---|---|")
    for arm in dict.fromkeys(each["arm"] for each in runs):
        mine = [each["steps"] for each in runs if each["arm"] == arm]
        trained = [[step for step in steps if "reward/mean" in step] for steps in mine]
        gain, half = mean_of([100 * (steps[-1][DENSE] - steps[0][DENSE]) for steps in mine])
        cells = [percent([steps[end][DENSE] for steps in mine]) for end in (0, -1)]
        cells.append(f"{gain:+.1f} ± {half:.1f}")
        cells += [percent([steps[end][SPARSE] for steps in mine]) if SPARSE in mine[0][0] else "" for end in (0, -1)]
        cells.append(percent([mean_of_key(steps, "sparse/rejection_rate") for steps in trained]))
        cells.append(f"{statistics.mean(mean_of_key(steps, 'sparse/xi_p05') for steps in trained):.3f}")
        cells.append(f"{max(each['seconds'] for each in runs if each['arm'] == arm):.0f}")
        print(f"| {arm} | {' | '.join(cells)} |")


def mean_of_key(steps, key):
    return statistics.mean(step[key] for step in steps)


def percent(values):
    return f"{100 * statistics.mean(values):.1f} %"


def plot(path, out):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sparse-rl"
    import matplotlib.pyplot as plt

    runs = json.loads(path.read_text())["runs"]
    panels = [("reward/mean", "reward of the rollouts"), ("sparse/rejection_rate", "share of rollouts rejected")]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, (key, title) in zip(axes, panels, strict=True):
        for colour, arm in enumerate(dict.fromkeys(each["arm"] for each in runs)):
            if key.startswith("sparse/") and arm == "dense":
                continue
            rows = [[s for s in each["steps"] if key in s] for each in runs if each["arm"] == arm]
            steps = [step["step"] for step in rows[0]]
            values = list(zip(*[[step[key] for step in row] for row in rows], strict=True))
            middle = [statistics.mean(at) for at in values]
            axis.plot(steps, middle, color=f"C{colour}", label=arm)
            axis.fill_between(steps, [min(at) for at in values], [max(at) for at in values], color=f"C{colour}", alpha=0.15)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(out, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--seeds", type=int, default=3)
    runner.add_argument("--steps", type=int, default=20)
    runner.add_argument("--prompts", type=int, default=6)
    runner.add_argument("--budget", type=int, default=32)
    runner.add_argument("--lr", default="2e-4")
    runner.add_argument("--problems", type=int, default=256)
    runner.add_argument("--presets", action="store_true")
    runner.add_argument("--parallel", type=int, default=1)
    runner.add_argument("--out", type=Path, required=True)
    for name in ("table", "plot"):
        reader = commands.add_parser(name)
        reader.add_argument("json", type=Path)
        if name == "plot":
            reader.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    elif args.command == "table":
        table(args.json)
    else:
        plot(args.json, args.out)


if __name__ == "__main__":
    main()
