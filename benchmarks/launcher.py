"""What torchrun costs one process: python benchmarks/launcher.py 0.5B --json benchmarks/results/launcher.json

The same training steps on random weights (`sparse-rl bench step`, every response of full length, so every step has the same work) in
two processes, one started alone and one by torchrun, which take turns step by step: what else moves a machine's speed moves both.
Counted are the steps after the first three, in which much is compiled, and before the last, which one process takes while the other
ends; the interval is over pairs of steps.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sparse_rl.evaluate.statistics import t_interval

SETTLED = 3
FLAGS = ["--method", "sparse_rl", "--kv.budget", "160", "--kv.interval", "40", "--rollout.max-tokens", "256"]
FLAGS += ["--kv.policy", "rkv", "--kv.protect-prompt", "false"]
FLAGS += ["--rollout.prompts-per-step", "32", "--rollout.samples-per-prompt", "8", "--optimizer.tokens-per-microbatch", "8192"]
LAUNCHERS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"],
}
TURN = "TAKES_TURNS_IN"
"""Set in the two processes: the folder, in which a file named after a launcher says that it is its turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as sparse-rl bench step takes it, such as 0.5B")
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=FLAGS, help="of the steps, in place of the usual ones")
    args = parser.parse_args()
    records = measured(args.model, args.steps, args.flags)
    runs = {name: [step["step_s"] for step in record["arms"][0]["steps"]][SETTLED:-1] for name, record in records.items()}
    logs = [math.log(under / alone) for alone, under in zip(runs["alone"], runs["torchrun"], strict=True)]
    ratio, low, high = (math.exp(each) for each in t_interval(logs))
    kept = {key: records["alone"][key] for key in ("date", "machine", "versions")}
    found = {"benchmark": "launcher", **kept, "model": args.model, "flags": args.flags, "runs": runs}
    args.json.write_text(json.dumps(found | {"ratio": ratio, "low": low, "high": high}, indent=1) + "\n")
    medians = {name: statistics.median(times) for name, times in runs.items()}
    print(f"a step: {medians['alone']:.3f} s alone, {medians['torchrun']:.3f} s under torchrun, medians of {len(logs)}")
    print(f"{ratio:.3f} times as long [{low:.3f}, {high:.3f}]")


def measured(model: str, steps: int, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.json" for name in LAUNCHERS}
        environment = os.environ | {TURN: folder}
        running = {}
        for name, file in files.items():
            bench = ["bench", "step", model, "--steps", str(steps), "--json", str(file), *flags]
            with (Path(folder) / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(
                    [*LAUNCHERS[name], __file__, name, *bench], stdout=log, stderr=log, env=environment
                )
        (Path(folder) / "alone").touch()
        while any(process.poll() is None for process in running.values()):
            time.sleep(0.5)
            for name, process in running.items():
                if process.returncode:
                    for other in running.values():
                        other.terminate()
                        other.wait()
                    raise SystemExit(f"{name} failed:\n{(Path(folder) / f'{name}.log').read_text()}")
        return {name: json.loads(file.read_text()) for name, file in files.items()}


def take_turns(name: str, folder: Path) -> None:
    """Every step of this process waits for its turn, and then lets the other's begin."""
    from sparse_rl.train.trainer import TrainingRun

    other = next(each for each in LAUNCHERS if each != name)
    step = TrainingRun.step

    def in_turn(trainer: TrainingRun) -> Any:
        while not (folder / name).exists():
            time.sleep(0.002)
        (folder / name).unlink()
        try:
            return step(trainer)
        finally:
            (folder / other).touch()

    TrainingRun.step = in_turn  # type: ignore[method-assign]


if __name__ == "__main__":
    if TURN in os.environ:
        from sparse_rl.cli import main as sparse_rl

        take_turns(sys.argv[1], Path(os.environ[TURN]))
        sparse_rl(sys.argv[2:])
    else:
        main()
