"""`sparse-rl bench step`: measure whole training steps on random weights by phase, with a sparse and with a dense sampler."""

import argparse
import gc
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..config import Config
from ..errors import OutOfMemory, UserError, first_line
from ..kv.policies import from_settings
from ..models.load import place
from ..terminal import titled_table, wide_console
from ..train.memory import peak_metrics
from .record import environment, write_record
from .rollout import warm_up
from .synthetic import cap_memory, synthetic_trainer

PHASES = ("prefill", "decode", "compaction", "host", "grade", "old log-probs", "update", "sync")


def bench(args: argparse.Namespace, config: Config) -> None:
    if args.prompt_tokens < 1:
        raise UserError(f"prompt-tokens = {args.prompt_tokens} is invalid: it must be at least 1.")
    from_settings(config.kv)
    cap_memory(args.memory_cap)
    console = wide_console()
    methods = [args.method] if args.method else ["sparse_rl", "dense"]
    dtype, device = place(config.model.dtype, config.model.device)
    config = config.changed(model={"dtype": dtype})
    steps = config.steps if args.steps else 1
    rows = []
    for method in methods:
        arm = config.changed(method=method)
        rows.append({"method": method} | measure(arm, console, args.prompt_tokens, steps, args.lengths == "uniform"))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    console.print(table(rows))
    record = environment("step", torch.device(device)) | {
        "memory_cap": args.memory_cap,
        "prompt_tokens": args.prompt_tokens,
        "lengths": args.lengths,
        "config": config.model_dump(mode="json", by_alias=True),
        "arms": rows,
    }
    write_record(args.json, record, console)


def measure(config: Config, console: Console, prompt_tokens: int, steps: int, uniform: bool) -> dict[str, Any]:
    """Return the seconds of each phase for every step. `fits` is False if memory ran out."""
    try:
        with synthetic_trainer(config, console, prompt_tokens, uniform_lengths=uniform) as trainer:
            trainer.check_memory()
            if trainer.engine.use_graphs:
                prompts = (trainer.rollout_sampler.prompts * trainer.engine.slots)[: trainer.engine.slots]
                warm_up(trainer.engine, prompts, trainer.engine.kv.capacity, uniform=uniform)
            done = []
            for number in range(steps):
                metrics = trainer.step()
                done.append(phases(metrics))
                console.print(f"{config.method}, step {number + 1}: {done[-1]['step_s']:.1f} s")
            device = trainer.actor.learner.device
            return {
                "fits": True,
                "slots": trainer.engine.slots,
                "steps": done,
                **peak_metrics(trainer.plan, device),
                "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
            }
    except OutOfMemory as error:
        return {"fits": False, "why": str(error), "steps": []}
    except torch.OutOfMemoryError as error:
        return {"fits": False, "why": first_line(error), "steps": []}


def phases(metrics: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of one step. `host` is sampling time outside device work, `sync` is the rest of the
    learner's time."""
    at = {name: metrics[f"perf/{name}_s"] for name in ("prefill", "decode", "compaction", "grade", "rollout", "learner")}
    old, update = metrics["perf/old_logprobs_s"], metrics["perf/update_s"]
    tokens = metrics["perf/rollout_tokens_per_s"] * at["rollout"]
    return {
        **{name: at[name] for name in ("prefill", "decode", "compaction")},
        "host": max(0.0, at["rollout"] - at["prefill"] - at["decode"] - at["compaction"] - at["grade"]),
        "grade": at["grade"],
        "old log-probs": old,
        "update": update,
        "sync": max(0.0, at["learner"] - old - update),
        "step_s": metrics["perf/step_s"],
        "tokens": round(tokens),
        "token_savings": metrics["kv/token_savings"],
    }


def table(rows: list[dict[str, Any]]) -> Table:
    title = "Seconds of the last step by phase; peak allocated memory against the plan"
    made = titled_table(title, ("sampler", "slots", *PHASES, "step", "peak GiB", "planned"))
    for row in rows:
        if not row["fits"]:
            made.add_row(row["method"], "does not fit")
            continue
        last = row["steps"][-1]
        memory = [f"{row[key]:.2f}" if key in row else "" for key in ("memory/peak_gib", "memory/predicted_gib")]
        made.add_row(
            row["method"], str(row["slots"]), *(f"{last[name]:.2f}" for name in PHASES), f"{last['step_s']:.2f}", *memory
        )
    return made
