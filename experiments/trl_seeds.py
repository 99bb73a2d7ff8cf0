"""Does TRL's GRPO reach the same held-out accuracy on a bounded cache? Runs the two examples over seeds, one after another:

    python experiments/trl_seeds.py --seeds 0 1 2 3 --json benchmarks/results/trl-seeds.json

Seeds that are already in the JSON are not run again. Each script evaluates with its own cache: 40 problems, eight answers each.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

from sparse_rl.bench.record import environment
from sparse_rl.evaluate.statistics import t_interval

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = {"TRL": "trl_grpo.py", "bounded cache": "trl_sparse_grpo.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    record = json.loads(args.json.read_text()) if args.json.exists() else {"runs": []}
    done = {(run["script"], run["seed"]) for run in record["runs"]}
    for seed in args.seeds:
        for name, script in SCRIPTS.items():
            if (script, seed) not in done:
                record["runs"].append({"script": script, "seed": seed} | trained(EXAMPLES / script, seed))
                where = environment("trl-seeds", torch.device("cpu"))
                where["versions"]["trl"] = version("trl")
                args.json.write_text(json.dumps(where | record, indent=1) + "\n")
                print(f"{name}, seed {seed}: {record['runs'][-1]['accuracy']:.3f}", flush=True)
    found = {
        script: {run["seed"]: run["accuracy"] for run in record["runs"] if run["script"] == script}
        for script in SCRIPTS.values()
    }
    for name, script in SCRIPTS.items():
        print(f"{name}: {spread(list(found[script].values()))}")
    dense, sparse = found.values()
    print(f"difference, paired by seed: {spread([sparse[seed] - dense[seed] for seed in dense.keys() & sparse.keys()])}")


def trained(script: Path, seed: int) -> dict[str, float]:
    """Run a script in a process of its own. Return its held-out accuracy and seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([sys.executable, str(script), "--seed", str(seed)], cwd=folder, capture_output=True, text=True)
    accuracy = re.search(r"held-out accuracy (\S+)", ended.stdout)
    if accuracy is None:
        sys.exit(ended.stderr[-2000:])
    return {"accuracy": float(accuracy[1]), "seconds": round(time.monotonic() - started, 1)}


def spread(values: list[float]) -> str:
    mean, low, high = t_interval(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
