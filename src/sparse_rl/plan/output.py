"""`sparse-rl plan`: format a plan as tables, as JSON, and as the two lines that `train` prints before its first step."""

import json
import re
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..config import Config
from ..data.examples import name_of
from ..errors import UserError
from ..format import counted, duration, gib
from ..host_memory import machine_bytes
from ..sizes import dense_bytes, slot_bytes, window_bytes
from ..terminal import titled_table, wide_console
from ..text import listed, printable
from .budgets import BudgetRow, guide
from .dimensions import dimensions
from .evaluation import evaluation_times, evaluations, run_s, share_of_run
from .host import OTHER_MACHINE, HostPlan, host_plan
from .memory import CONTEXT_BYTES, Plan, auto_limit, largest_budget, make_plan, most_slots
from .parts import itemsize, sharded, update_parts
from .remedies import Remedy, remedies, timed_sentence
from .roofline import (
    GPU,
    NETWORK_BYTES_PER_S,
    NODE_BYTES_PER_S,
    NODE_GPUS,
    communication,
    find_gpu,
    nearest_gpu,
    step_time,
    steps_s,
)

UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "tib": 2**40, "tb": 10**12}
ESTIMATED = (
    "Activations of recurrent layers and experts are estimated from the widths of their linear layers, with the fast kernels of "
    "recurrent layers. They were not measured."
)


def parse_size(text: str) -> int:
    """Parse a size such as `24GiB`, `24GB` or `24 GiB`, and return it in bytes."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*", text)
    if not found or found[2].lower() not in UNITS:
        raise UserError(f"{text!r} is not a valid size: use a number and a unit, such as 24GiB or 24GB.")
    return int(float(found[1]) * UNITS[found[2].lower()])


def show_plan(
    config: Config,
    *,
    gpu_memory: str | None,
    gpu_name: str | None,
    host_memory: str | None,
    prompt_tokens: int,
    file: Path | None,
) -> None:
    config = checked_inputs(config, prompt_tokens)
    named = find_gpu(gpu_name or "H200")
    total = parse_size(gpu_memory) if gpu_memory else named.memory_bytes
    host_bytes = parse_size(host_memory) if host_memory else None
    gpu = named if gpu_name else nearest_gpu(total)
    dims = dimensions(config.model.path)
    plan = make_plan(config, dims, memory_bytes=total - CONTEXT_BYTES, prompt_tokens=prompt_tokens)
    console = wide_console()
    console.print_line(headline(plan, total))
    for warning in filter(None, (beyond_context(plan), never_evicts(config, plan.prompt_tokens))):
        console.print_line(f"warning: {warning}", style="yellow")
    if config.sets_budget:
        tokens = f"{plan.config.kv.kept_tokens:,} tokens, half of the longest sequence"
        console.print_line(f"kv.budget = auto is planned with {tokens}. A run measures it.")
    console.print(phase_table(plan, "GiB by phase of a step"))
    console.print_line(activations(plan))
    console.print(fit_table(plan))
    console.print(time_table(plan, gpu, assumed=gpu_name is None))
    found = [] if plan.fits else remedies(plan, gpu, host_bytes=host_bytes)
    rows = guide(plan, found, gpu, console, host_bytes)
    console.print(evaluation_table(plan, gpu) if evaluations(config) else no_evaluation(config))
    if plan.fits and evaluations(config):
        console.print_line(run_line(plan, gpu))
    if sharded(config):
        console.print_line(communication_line(plan, gpu))
    host = host_plan(plan, host_bytes or machine_bytes())
    console.print(phase_table(host, "GiB in host memory by phase" + (" and rank" if host.ranks > 1 else "")))
    console.print_line(host.line)
    if host.warning:
        console.print_line(f"warning: {host.warning}{'' if host_bytes else OTHER_MACHINE}", style="yellow")
    console.print_line(verdict(plan, total, found, host_bytes))
    if file:
        file.write_text(json.dumps(record(plan, gpu, total, rows) | {"host": host.record}, indent=1) + "\n")


def checked_inputs(config: Config, prompt_tokens: int) -> Config:
    """Check the arguments of `plan`. Return the config with the dtype that a GPU uses by default."""
    if prompt_tokens < 1:
        raise UserError(f"prompt-tokens = {prompt_tokens} is invalid: it must be at least 1.")
    config.refuse_unused_bits()
    return config if config.model.dtype else config.changed(model={"dtype": "bfloat16"})


def headline(plan: Plan, total: int) -> str:
    config, dims = plan.config, plan.dims
    lora = config.model.lora
    how = f"LoRA of rank {lora.rank}{' on 4 bits' if lora.base == '4bit' else ''}" if lora.rank else "all weights trained"
    return (
        f"{config.model.path}: {dims.params / 1e9:.2f} billion parameters in {config.model.dtype}, {how}, optimizer state "
        f"{config.optimizer.state}; method {config.method}, {counted(plan.slots, 'slot')}, prompts of {plan.prompt_tokens} and "
        f"responses of up to {config.rollout.max_tokens:,} tokens, {config.optimizer.tokens_per_microbatch:,} tokens per "
        f"micro-batch; {gpus(config)}{gib(total)} GiB{' each' if config.ranks.count > 1 else ''}. All values are computed, "
        "not measured."
    )


def beyond_context(plan: Plan) -> str | None:
    """Return a sentence if `train` refuses the planned lengths, because they exceed the model's context."""
    context, tokens = plan.dims.context, plan.config.rollout.max_tokens
    if context is None or plan.prompt_tokens + tokens <= context:
        return None
    fits = context - plan.prompt_tokens
    remedy = f"--rollout.max-tokens {fits} fits" if fits > 0 else "use shorter prompts"
    return (
        f"prompts of {plan.prompt_tokens:,} and responses of {tokens:,} tokens exceed the model's context of {context:,}, so train "
        f"refuses them: {remedy}."
    )


def never_evicts(config: Config, prompt_tokens: int) -> str | None:
    """Return a sentence if no planned sequence fills the budget at a compaction."""
    return config.sampler_kv.never_evicts(prompt_tokens, config.rollout.max_tokens)


def gpus(config: Config) -> str:
    return f"{config.ranks.count} GPUs of " if config.ranks.count > 1 else ""


def phase_table(plan: Plan | HostPlan, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    names = list(dict.fromkeys(name for phase in plan.phases for name, count in phase.parts.items() if count))
    for phase in plan.phases:
        table.add_column(phase.name, justify="right", style="bold" if phase is plan.fullest else "")
    for name in names:
        table.add_row(name, *(gib(phase.parts[name]) if phase.parts.get(name) else "" for phase in plan.phases))
    table.add_section()
    table.add_row("all", *(gib(phase.total) for phase in plan.phases))
    return table


def recomputing(count: int, layers: int) -> str:
    if count in (0, layers):
        return "all layers recompute them" if count else "no layer recomputes them"
    return f"{count} of {layers} layers recompute them"


def activations(plan: Plan) -> str:
    """Return a sentence with the size of the activations, with and without gradient checkpointing."""
    layers, chosen = plan.dims.layers, plan.checkpointed_layers
    counts = sorted({0, chosen, layers})
    sizes = [gib(update_parts(plan.config, plan.dims, plan.prompt_tokens, count)["activations"]) for count in counts]
    found = [f"{size} GiB if {recomputing(count, layers)}" for count, size in zip(counts, sizes, strict=True)]
    sentence = f"Activations of the fullest micro-batch: {listed(found)}. In this run, {recomputing(chosen, layers)}."
    return f"{sentence} {ESTIMATED}" if plan.dims.estimated_width else sentence


def arms(plan: Plan) -> list[tuple[str, Plan]]:
    """Return (name, plan) of the run with its bounded cache and with a dense one."""
    config = plan.config
    sparse = config.changed(method="sparse_rl") if config.method == "dense" else config
    dense = config.changed(method="dense")
    return [(config.kv.label, plan.replanned(sparse)), ("dense", plan.replanned(dense))]


def fit_table(plan: Plan) -> Table:
    of_slot = "KV and states of a slot, MiB" if plan.dims.states else "KV of a slot, MiB"
    headings = ("sampler", of_slot, "slots that fit", "slots", "peak GiB", "in phase", "free GiB")
    table = titled_table("What fits", [*headings, "largest budget with these slots"], left=["in phase"])
    for name, arm in arms(plan):
        kv, size, longest = arm.config.sampler_kv, itemsize(arm.config), arm.prompt_tokens + arm.config.rollout.max_tokens
        keys = sum(slot_bytes(arm.dims.full, kv, size)) + window_bytes(arm.dims, longest, size) + arm.dims.state_bytes(size)
        keys += dense_bytes(arm.dims.full, 0, arm.pages, size, kv.dtype) // arm.slots
        most = most_slots(arm.config, arm.dims, arm.memory_bytes, arm.prompt_tokens, 4 * auto_limit(arm.config))
        budget = "" if kv.policy == "full" else str(largest_budget(arm) or "none")
        free = gib(arm.free_bytes) if arm.fits else f"lacks {gib(-arm.free_bytes)}"
        table.add_row(
            name, f"{keys / 2**20:,.1f}", str(most), str(arm.slots), gib(arm.peak_bytes), arm.fullest.name, free, budget
        )
    return table


def time_table(plan: Plan, gpu: GPU, *, assumed: bool) -> Table:
    several = plan.config.ranks.count > 1
    count = f"{plan.config.ranks.count} x " if several else ""
    speed = f"{count}{gpu.name}{' (assumed: set yours with --gpu)' if assumed else ''}"
    headings = [
        "sampler",
        "slots",
        "decode step ms",
        "decode tokens/s",
        "prefill s",
        "decode s",
        "old log-probs s",
        "update s",
    ]
    headings += [*(["sync s"] if several else []), "step s", counted(plan.config.steps, "step")]
    table = titled_table(f"Step time, computed for {speed}, all responses at full length", headings)
    for name, arm in arms(plan):
        if not arm.fits:
            table.add_row(name, "does not fit")
            continue
        at = step_time(arm, gpu)
        seconds = (at.prefill_s, at.decode_s, at.old_s, at.update_s, *((at.sync_s,) if several else ()), at.total_s)
        table.add_row(
            name,
            str(arm.slots),
            f"{1e3 * at.decode_step_s:.2f}",
            f"{at.tokens_per_s:,.0f}",
            *(f"{each:,.1f}" for each in seconds),
            duration(steps_s(arm, gpu)),
        )
    return table


def evaluation_table(plan: Plan, gpu: GPU) -> Table:
    title = f"Evaluation time, computed for {gpu.name}, all responses at full length"
    headings = ("cache", "held-out sets", "rollouts", "slots", "evaluation s", "evaluations", "share of the run")
    table = titled_table(title, headings, left=["held-out sets"])
    sets = escape(printable(", ".join(map(name_of, plan.config.data.held_out))))
    times, run_share = evaluation_times(plan, gpu), share_of_run(plan, gpu)
    total = sum(each.seconds for each in times)
    for each in times:
        cost = ["does not fit"]
        if plan.fits:
            share = run_share * each.seconds / total
            cost = [str(each.slots), f"{each.seconds:,.1f}", str(evaluations(plan.config)), f"{share:.1%}"]
        table.add_row(each.cache, sets, f"{each.rollouts:,}", *cost)
    return table


def run_line(plan: Plan, gpu: GPU) -> str:
    config = plan.config
    methods = f" of each of {len(config.compare)} methods" if len(config.compare) > 1 else ""
    time = duration(run_s(plan, gpu))
    evaluated = counted(evaluations(config), "evaluation")
    return f"This run takes {time} at best: {counted(config.steps, 'step')} and {evaluated}{methods}."


def no_evaluation(config: Config) -> str:
    return f"No evaluation ({'eval.problems = 0' if config.data.held_out else 'no held-out problems: set data.test'})."


def communication_line(plan: Plan, gpu: GPU) -> str:
    travels, waits = communication(plan), step_time(plan, gpu).exposed_s
    return (
        f"Each GPU receives {gib(travels.gathered_bytes)} GiB of weights and {gib(travels.reduced_bytes)} GiB of gradients "
        f"per step (assumed: {NODE_BYTES_PER_S / 1e9:.0f} GB/s within a machine of {NODE_GPUS}, "
        f"{NETWORK_BYTES_PER_S / 1e9:.0f} GB/s between machines); {waits:,.1f} s of this transfer do not overlap with the "
        "learner's computation."
    )


def verdict(plan: Plan, total: int, found: list[Remedy], host_bytes: int | None) -> str:
    peak = f"the peak is {gib(plan.peak_bytes)} GiB, in phase {plan.fullest.name}"
    if plan.fits:
        return (
            f"The run fits: {peak}. With graphs, allocator and CUDA it needs {gib(plan.needed_bytes + CONTEXT_BYTES)} of "
            f"{gib(total)} GiB; {gib(plan.free_bytes)} GiB are free."
        )
    lacks = f"With graphs, allocator and CUDA it needs {gib(-plan.free_bytes)} GiB more than there is"
    return f"The run does not fit: {peak}. {lacks}; {timed_sentence(plan, found, host_bytes)}."


def compact(plan: Plan) -> list[str]:
    """Return the plan as the two lines that `train` prints."""
    slots = f"{counted(plan.slots, 'slot')}{' (auto)' if plan.config.rollout.slots == 'auto' else ''}"
    room = f" of {gib(plan.memory_bytes)}" if plan.memory_bytes else ""
    return [
        f"plan: {slots}, peak {gib(plan.peak_bytes)}{room} GiB in {plan.fullest.name} ({plan.fullest.in_words})",
        "plan by phase, GiB: " + ", ".join(f"{phase.name} {gib(phase.total)}" for phase in plan.phases),
    ]


def record(plan: Plan, gpu: GPU, total: int, rows: list[BudgetRow]) -> dict[str, Any]:
    return {
        "model": plan.config.model.path,
        "params": plan.dims.params,
        "gpu_memory_bytes": total,
        "context_bytes": CONTEXT_BYTES,
        "prompt_tokens": plan.prompt_tokens,
        "slots": plan.slots,
        "pages": plan.pages,
        "fits": plan.fits,
        "peak_bytes": plan.peak_bytes,
        "peak_phase": plan.fullest.name,
        "needed_bytes": plan.needed_bytes,
        "phases": {phase.name: phase.parts | {"all": phase.total} for phase in plan.phases},
        "step_time_computed_s": {name: step_time(arm, gpu).total_s if arm.fits else None for name, arm in arms(plan)},
        "run_time_computed_s": run_s(plan, gpu) if plan.fits else None,
        "budgets": [
            {"sampler": row.name, "share": row.share, "slots": row.plan.slots, "step_time_computed_s": row.step_s}
            for row in rows
        ],
        "evaluation": {
            "evaluations": evaluations(plan.config),
            "caches": {
                each.cache: {"rollouts": each.rollouts, "slots": each.slots, "time_computed_s": each.seconds}
                for each in (evaluation_times(plan, gpu) if plan.fits else [])
            },
            "share_of_run_computed": share_of_run(plan, gpu) if plan.fits else None,
        },
        "gpu": gpu.name,
        "config": plan.config.model_dump(mode="json", by_alias=True),
    }
