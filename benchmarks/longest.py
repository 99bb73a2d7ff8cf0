"""Does the longest response that the plan names train? One update at that length and by default one at a length 10 % longer:

    python benchmarks/longest.py --json benchmarks/results/longest.json [--cases "7B LoRA"] [--dry-run] [--sample]

Random weights, one prompt of 256 tokens, two rollouts, a sparse sampler of two slots (R-KV 512+128). The shape's context is not
a limit. The process is capped at each memory size less the plan's CUDA context. Every run is a process of its own, shortest
first; what is already in the JSON is not run again, unless it failed.

By default sampling is cut short: the sampler's cache and decode graphs are allocated and run for one chunk, then one synthetic
rollout of the length runs forward and backward, beside accumulated gradients, and the optimizer steps. `--sample` runs a whole
training step instead. No response is longer than `--at-most`, the context of today's small models. `full` uses the first optimizer state of fp32, 8bit, offload with which responses of 128 tokens fit.
Without a GPU there is no cap and no measured peak.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the command line does

import torch

from sparse_rl.config import Config
from sparse_rl.errors import first_line
from sparse_rl.format import GIB
from sparse_rl.host_memory import machine_bytes
from sparse_rl.plan import Plan, dimensions, make_plan
from sparse_rl.plan.longest import longest_response
from sparse_rl.plan.memory import CONTEXT_BYTES
from sparse_rl.plan.output import parse_size
from sparse_rl.plan.roofline import find_gpu, step_time
from sparse_rl.terminal import wide_console

FIXED = {
    "reward": {"function": "sparse_rl.bench.reward:parity", "truncated": "grade"},  # every rollout has full length
    "data": {"train": "arithmetic"},
    "kv": {"policy": "rkv", "protect_prompt": False},
    "eval": {"problems": 0},
    "log": {"rollouts_per_step": 0, "traces_per_step": 0},
}
TRAINED = {"full": 0, "LoRA rank 16": 16}
STATES = ("fp32", "8bit", "offload")
FEWEST_TOKENS = 128
"""Shortest response for which an optimizer state counts as fitting."""
SHORT_TOKENS = 64
"""Length of the first rollout, which leaves gradients for the second one to be added to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1.5B,7B", help="shapes of sparse_rl.models.shapes, or tiny [1.5B,7B]")
    parser.add_argument("--memory", default="24GB,80GB,141GB", help="memory sizes [24GB,80GB,141GB]")
    parser.add_argument("--cases", default="", help="only cases whose name contains this: 7B, LoRA, 24GB")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of the prompt [256]")
    parser.add_argument("--factors", default="1.0,1.1", help="lengths to run, as multiples of the planned one [1.0,1.1]")
    parser.add_argument(
        "--at-most", type=int, default=131_072, help="run no longer response than this, whatever is planned [131072]"
    )
    parser.add_argument("--sample", action="store_true", help="run a whole training step, sampling included")
    parser.add_argument("--dry-run", action="store_true", help="print lengths and computed seconds, and run nothing")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a run is ended [300]")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run in this process: its settings as JSON
    args = parser.parse_args()
    if args.run:
        args.json.write_text(json.dumps(run(json.loads(args.run))))
        return
    record = json.loads(args.json.read_text()) if args.json.exists() else {}
    done = {case["name"]: case for case in record.get("cases", []) if not any("failed" in each for each in case["runs"])}
    planned = [
        plan_case(shape, trained, memory, args)
        for shape in args.shapes.split(",")
        for trained in TRAINED
        for memory in args.memory.split(",")
    ]
    for case in sorted(planned, key=lambda each: each["computed_update_s"]):
        if args.cases not in case["name"]:
            continue
        print(
            f"{case['name']}: {case['planned_tokens']:,} tokens planned, {case['computed_update_s']:.0f} s an update, computed"
        )
        if case["name"] in done:
            print("  already in the JSON")
        elif not args.dry_run:
            found, where = measure(case, args)
            done[case["name"]] = found
            record = where | record | {"seed": 0, "prompt_tokens": args.prompt_tokens, "cases": list(done.values())}
            args.json.write_text(json.dumps(record, indent=1) + "\n")


def plan_case(shape: str, trained: str, memory: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the case with the longest response of the plan; 0 tokens if none trains."""
    room = parse_size(memory) - CONTEXT_BYTES
    case: dict[str, Any] = {
        "name": f"{shape} {trained} {memory}{' sampled' if args.sample else ''}",
        "shape": shape,
        "trained": trained,
        "memory": memory,
        "cap_bytes": room,
        "planned_tokens": 0,
        "computed_update_s": 0.0,
    }
    for state in STATES[: 1 if TRAINED[trained] else None]:
        config = config_of(case | {"state": state}, FEWEST_TOKENS, args.prompt_tokens)
        found = longest_response(
            config,
            dimensions(shape),
            memory_bytes=room,
            prompt_tokens=args.prompt_tokens,
            host_bytes=machine_bytes() if torch.cuda.is_available() else None,
        )
        if found.by_memory >= FEWEST_TOKENS:
            plan = plan_at(case | {"state": state}, found.by_memory, args.prompt_tokens)
            of_one = step_time(plan, find_gpu("H200")).update_s / plan.config.rollout.rollouts_per_step
            return case | {"state": state, "planned_tokens": found.by_memory, "computed_update_s": of_one}
    return case | {"state": None}


def config_of(case: dict[str, Any], tokens: int, prompt_tokens: int) -> Config:
    """Return the config of a run: one prompt, two rollouts, one rollout in a micro-batch."""
    values = {
        "model": {
            "path": case["shape"],
            "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
            "lora": {"rank": TRAINED[case["trained"]], "merge": False},
        },
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_tokens": tokens},
        "optimizer": {"state": case["state"], "tokens_per_microbatch": prompt_tokens + tokens},
    }
    return Config(**values, **FIXED)


def plan_at(case: dict[str, Any], tokens: int, prompt_tokens: int) -> Plan:
    config = config_of(case, tokens, prompt_tokens)
    room = case["cap_bytes"]
    return make_plan(config, dimensions(case["shape"]), memory_bytes=room, prompt_tokens=prompt_tokens, slots=2)


def measure(case: dict[str, Any], args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the case with its runs, the environment of the runs). A longer response runs only if the planned one trained."""
    runs, where = [], {}
    for factor in map(float, args.factors.split(",")) if case["planned_tokens"] else ():
        tokens = min(round(factor * case["planned_tokens"]), args.at_most)
        settings = case | {"tokens": tokens, "sample": args.sample, "prompt_tokens": args.prompt_tokens}
        ended = in_process(settings, args.timeout)
        where = ended.pop("environment", {}) or where
        runs.append({"tokens": tokens, "sampled": args.sample} | ended)
        print("  " + summary(runs[-1]), flush=True)
        if not ended.get("trained"):
            break
    return case | {"runs": runs}, where


def in_process(settings: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, __file__, "--json", str(out), "--run", json.dumps(settings)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"trained": False, "failed": f"ended after {timeout_s:.0f} s"}
        if out.exists():
            return json.loads(out.read_text())
        return {"trained": False, "failed": (ended.stderr or ended.stdout)[-2000:]}


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train at one length in this process. Return the peak, whether memory ran out, and the seconds."""
    from sparse_rl.bench.record import environment
    from sparse_rl.bench.synthetic import cap_memory

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        cap_memory(f"{settings['cap_bytes'] / 2**20:.0f}MiB")
    tokens, prompt_tokens = settings["tokens"], settings["prompt_tokens"]
    config, plan = config_of(settings, tokens, prompt_tokens), plan_at(settings, tokens, prompt_tokens)
    found = whole_step(config, prompt_tokens) if settings["sample"] else learner_alone(config, prompt_tokens)
    on_gpu = device.type == "cuda"
    return found | {
        "planned_peak_bytes": plan.peak_bytes,
        "planned_needed_bytes": plan.needed_bytes,
        "planned_phase": plan.fullest.name,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "environment": environment("longest", device),
    }


def whole_step(config: Config, prompt_tokens: int) -> dict[str, Any]:
    from sparse_rl.bench import step

    found = step.measure(config, wide_console(), prompt_tokens, 1, uniform=False)
    if not found["fits"]:
        return {"trained": False, "out_of_memory": True, "in": found["why"], "seconds": None}
    (phases,) = found["steps"]
    return {
        "trained": True,
        "out_of_memory": False,
        "trained_tokens": phases["tokens"],
        "seconds": phases["step_s"],
        "phases_s": phases,
    }


def learner_alone(config: Config, prompt_tokens: int) -> dict[str, Any]:
    """Run the sampler for one chunk, then train one synthetic rollout of full length. `seconds` is the time of the latter."""
    from sparse_rl.bench.synthetic import synthetic_trainer
    from sparse_rl.train.preflight import try_sampler

    part = "load"
    try:
        with synthetic_trainer(config, wide_console(), prompt_tokens, uniform_lengths=False) as trainer:
            part = "sampling"
            trainer.actor.merge()
            try_sampler(trainer.engine, trainer.longest_prompt_ids, config)
            trainer.actor.restore()
            part = "update"
            seconds, norm = train_one(trainer)
            count = trainer.optimizer.checkpointed_layers
    except torch.OutOfMemoryError as error:
        return {"trained": False, "out_of_memory": True, "in": part, "why": first_line(error), "seconds": None}
    return {
        "trained": norm is not None,
        "out_of_memory": False,
        "trained_tokens": config.rollout.max_tokens,
        "seconds": seconds,
        "grad_norm": norm,
        "checkpointed_layers": count,
    }


def train_one(trainer) -> tuple[float, float | None]:
    """Return (seconds of a full-length rollout through the learner and of the update, gradient norm)."""
    from sparse_rl.train.preflight import add_gradients, longest_rollout

    config, model, optimizer = trainer.config, trainer.actor.learner, trainer.optimizer
    shape, prompt = trainer.engine.limits.shape, trainer.longest_prompt_ids
    lengths = (min(SHORT_TOKENS, config.rollout.max_tokens), config.rollout.max_tokens)
    rollouts = [longest_rollout(prompt, tokens, config, shape) for tokens in lengths]
    add_gradients(model, optimizer, rollouts, [[0]], config)  # also compiles the layers
    started = synchronized()
    add_gradients(model, optimizer, rollouts, [[1]], config)
    norm = optimizer.update(0)
    trainer.actor.sync()
    return synchronized() - started, norm


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def summary(run: dict[str, Any]) -> str:
    start = f"{run['tokens']:,} tokens: "
    if "failed" in run:
        return start + f"failed: {run['failed'][-500:]}"
    planned = f"planned {run['planned_peak_bytes'] / GIB:.2f} GiB"
    peak = "" if run["peak_bytes"] is None else f", peak {run['peak_bytes'] / GIB:.2f}"
    if run["out_of_memory"]:
        return start + f"out of memory in {run['in']}, {planned}{peak}"
    return start + f"trained in {run['seconds']:.1f} s, {planned}{peak}"


if __name__ == "__main__":
    main()
