"""Run the questions of this folder in slices of GPU time, several runs at once, and keep a ledger of what is done:

    python experiments/evidence/slices.py pilot a-collapse --model MODEL --data.dir DATA --seconds 1200 --at-once 4

A question is a folder with `arms.toml`: the seeds, and for each arm the flags of `sparse-rl train` beside `base.toml`. An arm may
have fewer `seeds`. Its models are evaluated if it has `evaluate`: caches, or true for a dense one and its own. `[evaluation]` has
the flags. Runs that
`ledger.jsonl` calls finished are not run again. A run that its slice ends is stopped after its step, saved, and resumed by the
next one; its folder is under --runs. When a run has ended, its metrics go to `raw/ARM-SEED.jsonl.gz` beside the arms.
"""

import argparse
import datetime
import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch import by_position

HERE = Path(__file__).parent
BASE = HERE / "base.toml"
LEDGER = HERE / "ledger.jsonl"
GRACE_S = 60
"""A run that is stopped finishes its step and saves."""


@dataclass(frozen=True)
class Run:
    question: str
    arm: str
    seed: int
    flags: dict[str, Any]
    evaluation: dict[str, Any] | None
    """Flags of `sparse-rl eval` for the trained model; None if it is not evaluated."""

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.question, self.arm, self.seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", help="folders beside this script, in order")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data.dir", dest="data")
    parser.add_argument(
        "--seeds", type=int, nargs="*", help="only these, one after another over all questions [all of each question]"
    )
    parser.add_argument("--arms", nargs="*", help="only these, in this order [all]")
    parser.add_argument("--seconds", type=float, default=1200, help="after which everything is stopped [1200]")
    parser.add_argument("--needs", type=float, default=0, help="seconds that must be left for a run to be started [0]")
    parser.add_argument("--at-once", type=int, default=4, help="runs on the GPU at a time [4]")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG=VALUE", help="for a trial of this script only")
    args = parser.parse_args()
    done = {(row["question"], row["arm"], row["seed"]) for row in ledger() if row["finished"]}
    waiting = [run for question in args.questions for run in runs_of(question) if run.key not in done]
    if args.seeds is not None:
        waiting = [run for seed in args.seeds for run in waiting if run.seed == seed]
    if args.arms is not None:
        waiting = [run for arm in args.arms for run in waiting if run.arm == arm]
    print(f"{len(waiting)} runs are left of {', '.join(args.questions)}", flush=True)
    slice_of(waiting, args)


def runs_of(question: str) -> list[Run]:
    """Return the runs seed by seed, so that a slice leaves whole seeds undone rather than whole arms."""
    plan = tomllib.loads((HERE / question / "arms.toml").read_text())
    common, arms = plan.get("common", {}), plan["arms"]
    seeds_of = {arm: flags.pop("seeds", plan["seeds"]) for arm, flags in arms.items()}
    caches_of = {arm: flags.pop("evaluate", None) for arm, flags in arms.items()}
    return [
        Run(question, arm, seed, {**common, **flags}, evaluation_with(caches_of[arm], plan))
        for seed in plan["seeds"]
        for arm, flags in arms.items()
        if seed in seeds_of[arm]
    ]


def evaluation_with(caches: str | bool | None, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the flags of the evaluation. `caches` are those of the arm; true stands for a dense one and the run's own."""
    if not caches:
        return None
    return plan["evaluation"] | ({} if caches is True else {"compare": caches})


def ledger() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LEDGER.read_text().splitlines()] if LEDGER.exists() else []


def slice_of(waiting: list[Run], args: argparse.Namespace) -> None:
    ends = time.monotonic() + args.seconds
    running: list[Running] = []
    while time.monotonic() < ends - GRACE_S:
        while waiting and len(running) < args.at_once and time.monotonic() < ends - args.needs:
            running.append(Running(waiting.pop(0), args))
        if not running:
            break
        time.sleep(1)
        for each in [each for each in running if each.process.poll() is not None]:
            if each.process.returncode or not each.next():
                running.remove(each)
                write_down(each, args)
    for each in running:
        each.process.send_signal(signal.SIGTERM)
    for each in running:
        try:
            each.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            each.process.kill()
        write_down(each, args)


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as flags of the command line."""
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in settings.items()]
    return [part for name, value in pairs for part in (name, value if isinstance(value, str) else json.dumps(value))]


class Running:
    """A run at work: training, then the evaluation of the trained model, if its arm has one."""

    def __init__(self, run: Run, args: argparse.Namespace):
        self.run, self.started = run, time.monotonic()
        self.folder = args.runs / run.question / run.name
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.folder.with_name(f"{run.name}.log").open("a")
        data = ["--data.dir", args.data] if args.data else []
        if (self.folder / "checkpoints").is_dir():
            train = ["train", "--resume", str(self.folder)]
        else:
            train = [
                "train",
                str(BASE),
                "--run-dir",
                str(self.folder),
                "--seed",
                str(run.seed),
                "--model.path",
                args.model,
                *data,
            ]
            train += as_flags({**run.flags, **dict(each.split("=", 1) for each in args.set)})
        self.commands = [train]
        if run.evaluation:
            evaluation = ["eval", str(self.folder / "model"), "--mismatch", *as_flags(run.evaluation), *data]
            self.commands += [[*evaluation, "--out", str(self.folder / "eval")]]
        self.next()

    def next(self) -> bool:
        """Start the next command, if there is one."""
        if not self.commands:
            return False
        command = self.commands.pop(0)
        print(f"{self.run.question}, {self.run.name}: sparse-rl {' '.join(command)}", flush=True)
        self.process = subprocess.Popen([sys.executable, "-m", "sparse_rl", *command], stdout=self.log, stderr=self.log)
        return True


def write_down(each: Running, args: argparse.Namespace) -> None:
    run, folder = each.run, each.folder
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    last = json.loads(lines[-1]) if lines else {}
    config = tomllib.loads((folder / "config.toml").read_text()) if (folder / "config.toml").exists() else {}
    evaluated = folder / "eval" / "results.json"
    trained = bool(lines) and last.get("step") == config.get("steps")
    finished = trained and (not run.evaluation or evaluated.exists())
    row = {"question": run.question, "arm": run.arm, "seed": run.seed, "finished": finished}
    row |= {"step": last.get("step", 0), "exit": each.process.returncode, "seconds": round(time.monotonic() - each.started)}
    row |= {"at_once": args.at_once, "date": datetime.date.today().isoformat()}
    with LEDGER.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    raw = HERE / run.question / "raw"
    if finished:  # gigabytes that nobody reads again
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        shutil.rmtree(folder / "model", ignore_errors=True)
    if trained:
        raw.mkdir(exist_ok=True)
        with gzip.GzipFile(raw / f"{run.name}.jsonl.gz", "wb", mtime=0) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
    if finished and run.evaluation:
        results = json.loads(evaluated.read_text()) | {"by_position": by_position(evaluated.parent)}
        results["asked"]["model"] = run.name  # and not where it was on that machine
        (raw / f"{run.name}-eval.json").write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
