"""What torchrun costs one process: python experiments/launcher.py 0.5B --json benchmarks/results/launcher.json

The same training steps on random weights (`sparse-rl bench step`, every response of full length, so every step has the same work),
started alone and by torchrun with one process, in turn. Steps are those after the first three, in which much is compiled.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTLED = 3
FLAGS = ["--method", "sparse_rl", "--kv.budget", "160", "--kv.interval", "40", "--rollout.max-tokens", "256"]
FLAGS += ["--rollout.prompts-per-step", "32", "--rollout.samples-per-prompt", "8", "--optimizer.tokens-per-microbatch", "8192"]
LAUNCHERS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as sparse-rl bench step takes it, such as 0.5B")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1, help="each way so many times, in turn [1]")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    runs: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    for _ in range(args.rounds):
        for name in LAUNCHERS:
            record = measured(name, args.model, args.steps)
            steps = [step["step_s"] for step in record["arms"][0]["steps"]][SETTLED:]
            runs[name] += steps
            print(name, [round(each, 3) for each in steps], flush=True)
    medians = {name: statistics.median(times) for name, times in runs.items()}
    ratio = medians["torchrun"] / medians["alone"]
    kept = {key: record[key] for key in ("date", "machine", "versions")}
    found = {
        "benchmark": "launcher",
        **kept,
        "model": args.model,
        "flags": FLAGS,
        "runs": runs,
        "medians": medians,
        "ratio": ratio,
    }
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"a step: {medians['alone']:.3f} s alone, {medians['torchrun']:.3f} s under torchrun, {ratio:.3f} times as long")


def measured(launcher: str, model: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = [*LAUNCHERS[launcher], "-m", "sparse_rl", "bench", "step", model, "--steps", str(steps), "--json", str(file)]
        done = subprocess.run([*command, *FLAGS], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(file.read_text())


if __name__ == "__main__":
    main()
