"""`sparse-rl plan --longest`: compute the longest response that trains, and what limits it. Nothing is measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..config import Config
from ..errors import UserError
from ..format import counted, gib
from ..host_memory import machine_bytes
from ..terminal import titled_table, wide_console
from .dimensions import Dimensions, dimensions
from .host import OTHER_MACHINE, host_plan
from .memory import CONTEXT_BYTES, Plan, largest, make_plan
from .output import ESTIMATED, checked_inputs, parse_size, recomputing
from .remedies import sentence
from .roofline import find_gpu

LIMIT_TOKENS = 2**24
"""Length at which the search ends."""
RANK = 16
"""LoRA rank of the table, if the config trains all weights."""


@dataclass(frozen=True)
class Longest:
    """The longest response that trains. `tokens` is 0 if no response does."""

    tokens: int
    """Largest `rollout.max_tokens` within the memory and the model's context."""
    by_memory: int
    """Largest `rollout.max_tokens` within the memory."""
    bound: str
    """Limit of `tokens`: the phase that exceeds the GPU's memory at one more token, `host memory` or `context`."""
    plan: Plan
    """Plan at `tokens`, or at one token if no response fits."""


def longest_response(
    config: Config, dims: Dimensions, *, memory_bytes: int, prompt_tokens: int = 256, host_bytes: int | None = None
) -> Longest:
    """Return the longest response for which the plan fits with `rollout.slots`, or with one group in the slots if "auto".

    A micro-batch holds at least one rollout. `optimizer.tokens_per_microbatch` is lowered to one rollout if more do not fit.
    """
    fewest = config.rollout.samples_per_prompt if config.rollout.slots == "auto" else config.rollout.slots

    def plan_at(tokens: int, slots: int | None, microbatch: int = 1) -> Plan:
        microbatch = min(config.optimizer.tokens_per_microbatch, max(microbatch, prompt_tokens + tokens))
        changed = config.changed(rollout={"max_tokens": tokens}, optimizer={"tokens_per_microbatch": microbatch})
        return make_plan(changed, dims, memory_bytes=memory_bytes, prompt_tokens=prompt_tokens, slots=slots)

    by_gpu = largest(lambda tokens: plan_at(tokens, fewest).fits, LIMIT_TOKENS)
    by_memory = by_gpu
    if host_bytes is not None:
        by_memory = largest(lambda tokens: host_plan(plan_at(tokens, fewest)).peak_bytes <= host_bytes, by_gpu)
    room = LIMIT_TOKENS if dims.context is None else max(0, dims.context - prompt_tokens)
    tokens = min(by_memory, room)
    configured = config.optimizer.tokens_per_microbatch
    fits_as_configured = plan_at(max(1, tokens), fewest, configured).fits
    plan = plan_at(max(1, tokens), None, configured if fits_as_configured else 1)
    if room < by_memory:
        bound = "context"
    elif by_memory < by_gpu:
        bound = "host memory"
    else:
        bound = plan_at(by_memory + 1, fewest).fullest.name
    return Longest(tokens, by_memory, bound, plan)


# Output


def show_longest(
    config: Config,
    *,
    is_recipe: bool,
    gpu_memory: str | None,
    gpu_name: str | None,
    host_memory: str | None,
    prompt_tokens: int,
    file: Path | None,
) -> None:
    """Print the longest response of a recipe, or a table for a model, for each size in `gpu_memory` (`24GB,80GB`)."""
    config = checked_inputs(config, prompt_tokens)
    gpu = find_gpu(gpu_name or "H200")
    sizes = {size.strip(): parse_size(size) for size in gpu_memory.split(",")} if gpu_memory else {gpu.name: gpu.memory_bytes}
    dims, host_bytes = dimensions(config.model.path), parse_size(host_memory) if host_memory else None
    console, rows = wide_console(), []
    for names, arm in [(named(config), config)] if is_recipe else arms(config, takes_4bit=dims.takes_4bit_base):
        for size, total in sizes.items():
            room = total - CONTEXT_BYTES
            found = longest_response(arm, dims, memory_bytes=room, prompt_tokens=prompt_tokens, host_bytes=host_bytes)
            rows.append((*names, size, found))
    if is_recipe:
        for row in rows:
            for line in sentences(row[-1], row[-2], host_bytes):
                console.print_line(line)
    else:
        console.print(longest_table(rows, list(sizes)))
        for line in notes(config, dims, prompt_tokens):
            console.print_line(line)
    if file:
        record = {"model": config.model.path, "prompt_tokens": prompt_tokens, "rows": [row_record(*row) for row in rows]}
        file.write_text(json.dumps(record, indent=1) + "\n")


def named(config: Config) -> tuple[str, str, str]:
    """Return (trained weights, optimizer state, sampler) of a config in words."""
    lora = config.model.lora
    sampler = config.sampler_kv.label if config.sampler_kv.is_sparse else "dense"
    trained = f"LoRA rank {lora.rank}{' on 4 bits' if lora.base == '4bit' else ''}" if lora.rank else "all weights"
    return trained, config.optimizer.state, sampler


def arms(config: Config, *, takes_4bit: bool) -> list[tuple[tuple[str, str, str], Config]]:
    """Return the rows of a model's table: all weights with each optimizer state, and LoRA on 16 and 4 bits, with a
    sparse and a dense sampler."""
    rank = config.model.lora.rank or RANK
    trained: list[tuple[int, str, str]] = [(0, state, "auto") for state in ("fp32", "8bit", "offload")]
    trained += [(rank, config.optimizer.state, base) for base in (("auto", "4bit") if takes_4bit else ("auto",))]
    sparse = "sparse_rl" if config.method == "dense" else config.method
    made = []
    for lora_rank, state, base in trained:
        lora = {"rank": lora_rank, "merge": False, "base": base}
        arm = config.changed(model={"lora": lora}, optimizer={"state": state})
        made += [arm.changed(method=method) for method in (sparse, "dense")]
    return [(named(each), each) for each in made]


def longest_table(rows: list[tuple[str, str, str, str, Longest]], sizes: list[str]) -> Table:
    title = "Longest response that trains, in tokens; slots at that length; what limits it"
    names = ("optimizer state", "sampler")
    table = titled_table(title, ["trained", *names, *sizes], left=names)
    for start in range(0, len(rows), len(sizes)):
        group = rows[start : start + len(sizes)]
        table.add_row(*group[0][:3], *(cell(row[-1]) for row in group))
    return table


def cell(found: Longest) -> str:
    if not found.tokens:
        return "none"
    alone = f" (memory: {found.by_memory:,})" if found.bound == "context" else ""
    return f"{found.tokens:,}; {counted(found.plan.slots, 'slot')}; {found.bound}{alone}"


def notes(config: Config, dims: Dimensions, prompt_tokens: int) -> list[str]:
    rollout = config.rollout
    slots = rollout.samples_per_prompt if rollout.slots == "auto" else rollout.slots
    found = [
        f"Computed by the plan, not measured: prompts of {prompt_tokens:,} tokens, {rollout.rollouts_per_step:,} rollouts per "
        f"step in at least {counted(slots, 'slot')}, micro-batches of "
        "one rollout if more do not fit."
    ]
    if dims.estimated_width:
        found.append(ESTIMATED)
    if dims.context:
        found.append(f"The model's config states a context of {dims.context:,} tokens, prompt included: train refuses more.")
    return found


def sentences(found: Longest, size: str, host_bytes: int | None) -> list[str]:
    """Return the answer for one memory size in sentences."""
    plan = found.plan
    if not found.tokens:
        if found.by_memory:
            return [f"No response trains: the prompt fills the model's context of {plan.dims.context:,} tokens."]
        advice = "it needs more host memory" if plan.fits else sentence(plan, host_bytes=host_bytes)
        return [f"No response trains in {size}, computed by the plan: {advice}."]
    rollout, optimizer = plan.config.rollout, plan.config.optimizer
    alone = f"; memory alone would allow {found.by_memory:,}" if found.bound == "context" else ""
    penalized = f" --advantage.overlong {found.tokens // 4}" if plan.config.advantage.overlong > found.tokens else ""
    host = host_plan(plan, host_bytes or machine_bytes())
    lines = [
        f"Longest response in {size}: rollout.max_tokens = {found.tokens:,}, with {counted(plan.slots, 'slot')} and "
        f"{rollout.rollouts_per_step:,} rollouts per step. Computed by the plan, not measured.",
        f"Limited by: {found.bound}{alone}.",
        f"Fullest phase: {plan.fullest.name}, {gib(plan.peak_bytes)} GiB ({plan.fullest.in_words}); "
        f"activations: {recomputing(plan.checkpointed_layers, plan.dims.layers)}.",
        f"Flags: --rollout.max-tokens {found.tokens} --optimizer.tokens-per-microbatch {optimizer.tokens_per_microbatch}"
        f"{penalized}",
        host.line,
    ]
    if plan.dims.estimated_width:
        lines.append(ESTIMATED)
    if host.warning and found.bound != "host memory":
        lines.append(f"warning: {host.warning}{'' if host_bytes else OTHER_MACHINE}")
    return lines


def row_record(trained: str, state: str, sampler: str, size: str, found: Longest) -> dict[str, Any]:
    return {
        "memory": size,
        "trained": trained,
        "optimizer_state": state,
        "sampler": sampler,
        "tokens": found.tokens,
        "tokens_by_memory": found.by_memory,
        "bound": found.bound if found.tokens else None,
        "slots": found.plan.slots if found.tokens else 0,
        "peak_bytes": found.plan.peak_bytes if found.tokens else None,
        "host_peak_bytes": host_plan(found.plan).peak_bytes if found.tokens else None,
    }


def refuse_length(flag: Any) -> None:
    """Raise UserError if a length was passed on the command line together with --longest."""
    if flag is not None:
        raise UserError(
            f"--rollout.max-tokens {flag} has no effect with --longest, which searches for it: remove one of them."
        )
