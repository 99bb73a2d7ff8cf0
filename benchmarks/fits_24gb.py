"""Does it fit a 24 GB card? Three steps of each 24 GB recipe with the process capped at 22 GiB, and one with a dense sampler:
python benchmarks/fits_24gb.py --json benchmarks/results/fits-24gb.json [--cases 7b]

Random weights of the recipes' shapes, 32 rollouts a step, responses uniform from 256 to 4,096 tokens. Every case is a process
of its own; what is already in the JSON is not run again. The dense cases run all at once, for they are asked whether they fit
and not how fast they are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

RECIPES = ("0.5b-full-24gb", "1.5b-full-24gb", "3b-lora-24gb", "7b-lora-24gb")
SHAPE = ["--rollout.prompts-per-step", "4", "--rollout.samples-per-prompt", "8", "--rollout.max-tokens", "4096"]
RKV = ["--kv.policy", "rkv", "--kv.protect-prompt", "false"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cases", default="", help="only cases whose name contains this: 7b, dense")
    args = parser.parse_args()
    done = json.loads(args.json.read_text()) if args.json.exists() else {}
    for method, steps, at_once in (("sparse_rl", 3, 1), ("dense", 1, len(RECIPES))):
        cases = {f"{recipe}, {method}": recipe for recipe in RECIPES}
        with ThreadPoolExecutor(at_once) as threads:
            running = {
                threads.submit(run, recipe, method, steps): case
                for case, recipe in cases.items()
                if case not in done and args.cases in case
            }
            for each in as_completed(running):
                case = running[each]
                done[case] = each.result()
                args.json.write_text(json.dumps(done, indent=1) + "\n")
                print(case, summary(done[case]), flush=True)


def run(recipe: str, method: str, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [sys.executable, "-m", "sparse_rl", "bench", "step", recipe, "--memory-cap", "22GiB", "--json", str(out)]
        command += ["--method", method, "--steps", str(steps), *SHAPE, *RKV]
        ended = subprocess.run(command, capture_output=True, text=True)
        if out.exists():
            return json.loads(out.read_text())
        return {"failed": (ended.stderr or ended.stdout)[-2000:]}


def summary(found: dict) -> str:
    if "failed" in found:
        return f"failed: {found['failed'][-300:]}"
    arm = found["arms"][0]
    if not arm["fits"]:
        return f"does not fit: {arm['why']}"
    seconds = ", ".join(f"{step['step_s']:.1f}" for step in arm["steps"])
    peak, planned = arm["memory/peak_gib"], arm["memory/predicted_gib"]
    return (
        f"{arm['slots']} slots, steps of {seconds} s, peak {peak:.2f} GiB, planned {planned:.2f} ({planned / peak - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
