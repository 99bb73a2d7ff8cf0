"""Decode speed of every policy, in one process and one sitting:

    python benchmarks/policy_speed.py --json benchmarks/results/policy-speed.json

Random weights of 1.5B, 256 slots of 512 + 128 in 16 bits, protected prompts of 256 tokens in groups of 8, responses of 2,048
tokens. `full` is the dense engine in pages. Every round runs each policy once, every second round in reverse order, so that a
machine that slows down does not favour one. Whole calls and decode are those of `sparse-rl bench rollout`.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparse_rl import KV
from sparse_rl.bench.record import environment
from sparse_rl.bench.rollout import bench_model, engine_arm
from sparse_rl.commands.arguments import add_model_flags
from sparse_rl.kv.policies import POLICIES
from sparse_rl.models.shapes import SHAPES

SPEEDS = ("tokens_per_s", "decode_tokens_per_s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="1.5B", help=f"a shape ({', '.join(SHAPES)}) with random weights, or a model")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(lengths="full", waves=1.0, head_dtype="float32")
    add_model_flags(parser)
    args = parser.parse_args(arguments)
    args.batch = args.slots
    model = bench_model(args)
    asked = {name: value for name, value in vars(args).items() if name not in ("json", "batch")}
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for number in range(args.rounds):
        for policy in list(POLICIES)[:: -1 if number % 2 else 1]:
            found[policy].append(measured(model, policy, args))
            print(number, policy, *(f"{name} {found[policy][-1][name] or 0:,.0f}" for name in SPEEDS), flush=True)
            if args.json:  # as it comes: a sitting takes minutes
                arms = [summary(policy, rounds) for policy, rounds in found.items() if rounds]
                record = environment("policy_speed", model.device) | {"asked": asked, "arms": arms}
                args.json.write_text(json.dumps(record, indent=1) + "\n")


def measured(model: Any, policy: str, args: argparse.Namespace) -> dict[str, Any]:
    kv = KV(policy=policy, budget=args.budget, interval=args.interval, protect_prompt=True)
    arm = engine_arm(model, kv, args.slots, args)
    return asdict(arm) | {"name": kv.label, "tokens_per_s": arm.tokens_per_s}


def summary(policy: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean speeds of a policy beside every round. Decode has none if answers are too short to measure it."""
    means = {name: statistics.fmean(each[name] for each in rounds) if rounds[0][name] else None for name in SPEEDS}
    return {"policy": policy} | means | {"rounds": rounds}


if __name__ == "__main__":
    main()
