"""`sparse-rl bench memory`: compare the memory that `plan` predicts for each phase with the GPU memory used, on random
weights."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..config import Config
from ..errors import UserError, first_line
from ..format import counted
from ..learner.replay import forward, response_logprobs
from ..models.compile import fused_layers
from ..terminal import titled_table, wide_console
from ..train.preflight import largest_microbatch, try_learner
from ..train.trainer import TrainingRun
from .record import environment, write_record
from .synthetic import cap_memory, synthetic_trainer


def bench(args: argparse.Namespace, config: Config) -> None:
    if not torch.cuda.is_available():
        raise UserError("bench memory needs a GPU: without one, use sparse-rl plan, which computes the same peaks.")
    cap_memory(args.memory_cap)
    console = wide_console()
    if config.model.dtype is None:
        config = config.changed(model={"dtype": "bfloat16"})
    found = measure(config, console, args.prompt_tokens)
    console.print(table(found))
    record = environment("memory", torch.device("cuda")) | {
        "memory_cap": args.memory_cap,
        "prompt_tokens": args.prompt_tokens,
        "config": config.model_dump(mode="json", by_alias=True),
        **found,
    }
    write_record(args.json, record, console)


def measure(config: Config, console: Console, prompt_tokens: int) -> dict[str, Any]:
    """Return the measured and the predicted peak bytes of each phase.

    Responses run just past one compaction, because the cache size does not depend on their length.
    """
    rows: dict[str, dict[str, Any]] = {}
    with synthetic_trainer(config, console, prompt_tokens, uniform_lengths=False) as trainer:
        plan = trainer.plan
        assert plan is not None
        predicted = {phase.name: phase.total for phase in plan.phases}
        # the benchmark measures both phases together
        predicted["sampling"] = max(predicted["sampling"], predicted.pop("prefill"))
        for name, run in parts(trainer).items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, started = torch.cuda.memory_allocated(), time.perf_counter()
            try:
                run()
                torch.cuda.synchronize()
            except torch.OutOfMemoryError as error:
                rows[name] = {"out_of_memory": first_line(error)}
                break
            rows[name] = {
                "before_bytes": before,
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "predicted_bytes": predicted.get(name),
                "seconds": time.perf_counter() - started,
            }
        phases = {phase.name: phase.parts for phase in plan.phases}
        return {"slots": trainer.engine.slots, "rows": rows, "predicted": phases, "needed_bytes": plan.needed_bytes}


def parts(trainer: TrainingRun) -> dict[str, Callable[[], Any]]:
    """Return the phases in the order of a step. The update runs as in the preflight."""
    config, engine, model = trainer.config, trainer.engine, trainer.actor.learner
    prompt = trainer.longest_prompt_ids
    rollouts = largest_microbatch(
        prompt, config, engine.limits.shape, plain=engine.limits.plain and not engine.limits.shape.states
    )
    full = config.kv.capacity + 1 if engine.policy.evicts else config.kv.interval
    held = 0 if engine.schedule.stores_prompts else len(prompt)
    tokens = min(config.rollout.max_tokens, max(config.kv.interval, full - held + config.kv.interval))
    sampling = config.rollout.sampling(config.seed).changed(max_tokens=tokens, stop=())

    def sample() -> None:
        per_prompt = config.rollout.samples_per_prompt
        count = max(1, -(-engine.slots // per_prompt))
        engine.generate(trainer.rollout_sampler.prompts[:count], per_prompt, sampling, record=False)

    @torch.no_grad()
    def old() -> None:
        with fused_layers(model):
            response_logprobs(model, forward(model, rollouts, "dense"))

    def optimize() -> None:
        for collector in trainer.optimizer.collectors:
            collector.grad = torch.zeros_like(collector)
        trainer.optimizer.update(0)

    def learn() -> None:
        try_learner(model, trainer.optimizer, prompt, config, engine.limits.shape)

    return {"sampling": sample, "old log-probs": old, "update": learn, "optimizer": optimize}


def table(found: dict[str, Any]) -> Table:
    made = titled_table(f"GiB by phase, {counted(found['slots'], 'slot')}", ("phase", "before", "peak", "predicted", "off"))
    for name, row in found["rows"].items():
        if "out_of_memory" in row:
            made.add_row(name, "", "out of memory")
            continue
        peak, predicted = row["peak_bytes"], row["predicted_bytes"]
        off = f"{predicted / peak - 1:+.1%}"
        made.add_row(name, *(f"{each / 2**30:.2f}" for each in (row["before_bytes"], peak, predicted)), off)
    return made
