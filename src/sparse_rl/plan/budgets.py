"""Compare budgets with dense training: slots and step time by share of the longest sequence, and measured results."""

from dataclasses import dataclass

from rich.table import Table

from ..config import KV
from ..format import counted, duration
from ..sizes import PAGE_TOKENS, pages_of, slot_bytes, token_bytes
from ..terminal import Terminal, titled_table
from .evaluation import without_evaluation
from .memory import Plan, largest
from .parts import itemsize
from .remedies import Remedy, faster
from .roofline import GPU, step_time, steps_s

MEASURED = {0.25: (52, 23.3), 0.34: (36, 29.0), 0.42: (23, 28.4), 0.49: (16, 30.4), 0.65: (4, 30.6)}
"""Initially rejected share and trained test Pass@1, in %, by R-KV's share of a mean sequence (docs/choosing-a-budget.md)."""
MEASURED_DENSE = 31.3
"""Test Pass@1 after dense training, in %."""
FEWER_BITS = KV(policy="full", dtype="4bit")
MEASURED_BITS = (0.5, 7, 46.6, 46.6)
"""Share rejected in the first and in the last five of 20 steps, and test score after them with FEWER_BITS and dense, in %
(docs/choosing-a-budget.md)."""
MEASURED_TRIATTENTION = {"16 GSM8K problems in a prompt": 3.9, "MATH-500": 13.9, "GSM8K": 35.7}
"""Share of answers that TriAttention rejects before training, in %: 1.5B, a fifth of the response as budget, half of it recent,
protected prompts (experiments/shootout, arm `triattention protected recent 0.2`)."""
SMALLER = (0.06, 0.12)
"""Smaller shares in the table, without a measured training run."""
SAME_SHARE = 0.01
"""Largest difference of two shares that count as the same."""
FASTER = 0.95
"""Sparse sampling wins if its step takes at most this share of the dense step."""
LONG_STEP_S = 600.0
"""Step time from which fewer prompts per step are suggested."""


@dataclass(frozen=True)
class BudgetRow:
    """A sampler's cache, planned with as many slots as fit."""

    name: str
    share: float
    """Cached tokens that stay after a compaction, as a share of the longest sequence; 1 if dense."""
    plan: Plan
    step_s: float | None
    """Computed time of a step; None if the run does not fit."""


def guide(plan: Plan, found: list[Remedy], gpu: GPU, console: Terminal, host_bytes: int | None) -> list[BudgetRow]:
    """Print and return the sweep of budgets, and print options that make a step shorter.

    If the plan does not fit, use the fastest remedy in `found`, preferably one that trains the same weights. If it fits but
    other options make it much faster, use these. `host_bytes` is the memory of the machine, if known.
    """
    if plan.fits:
        best = faster(plan, gpu, host_bytes)
    else:
        best = min(found, key=lambda each: (each.adapters, each.step_s), default=None)
    if not plan.fits and best is None:
        return []
    shorter = None
    if plan.fits and best:
        shorter = (
            f"A step takes {duration(best.step_s)} instead of {duration(step_time(plan, gpu).total_s)} with {best.flags}."
        )
    plan, flags = (best.plan, best.flags) if best else (plan, "")
    lines: list[str | None] = []
    rows = sweep(plan, gpu) if plan.config.kv.policy != "full" else []
    if rows:
        console.print(budget_table(plan, rows, gpu, flags))
        lines = [advice(plan, rows, gpu), bits_advice(plan) if plan.dims.takes_codes else None]
    for line in filter(None, (*lines, shorter, fewer_prompts(plan, gpu))):
        console.print_line(line)
    return rows


def longest_sequence(plan: Plan) -> int:
    return plan.prompt_tokens + plan.config.rollout.max_tokens


def sweep(plan: Plan, gpu: GPU) -> list[BudgetRow]:
    """Return a row for each share of the table and the configured budget, smallest first, then one for all keys in 4 bits, if the
    model supports that, and one for a dense cache."""
    kv = plan.config.kv
    stored = plan.prompt_tokens if kv.protect_prompt else 0
    longest = longest_sequence(plan)
    budgets = {round(share * longest) - stored for share in (*SMALLER, *MEASURED)}
    near = SAME_SHARE * longest
    budgets = {each for each in budgets if each >= kv.least_budget and abs(each - kv.kept_tokens) > near} | {kv.kept_tokens}
    caches = [kv.changed(budget=budget) for budget in sorted(budgets)]
    bits = (FEWER_BITS,) if plan.dims.takes_codes else ()
    return [_row(plan, gpu, each) for each in (*caches, *bits, None)]


def _row(plan: Plan, gpu: GPU, kv: KV | None, max_tokens: int | None = None) -> BudgetRow:
    """Return the row of a cache, or of dense training for None."""
    config = without_evaluation(plan.config)
    sparse = config.method if config.method != "dense" else "sparse_rl"
    config = config.changed(rollout={"slots": "auto", "max_tokens": max_tokens or config.rollout.max_tokens})
    made = plan.replanned(config.changed(method="dense") if kv is None else config.changed(method=sparse, kv=kv))
    share = 1.0
    if kv is not None and kv.policy != "full":
        share = (kv.kept_tokens + (plan.prompt_tokens if kv.protect_prompt else 0)) / longest_sequence(made)
    return BudgetRow(kv.label if kv else "dense", share, made, step_time(made, gpu).total_s if made.fits else None)


def budget_table(plan: Plan, rows: list[BudgetRow], gpu: GPU, flags: str = "") -> Table:
    """Return the table of a sweep. `flags` are the flags with which the plan fits."""
    steps, using = plan.config.steps, f" with {flags}" if flags else ""
    headings = ("sampler", "of the longest sequence", "slots", "step s", counted(steps, "step"), "speed-up")
    title = f"Budgets on {gpu.name}{using}, with as many slots as fit"
    table = titled_table(title, [*headings, "measured with R-KV: rejected, Pass@1"])
    dense_s = rows[-1].step_s
    for row in rows:
        name = f"{row.name} (this run)" if row.plan.config.sampler_kv == plan.config.sampler_kv else row.name
        known = [figures for share, figures in MEASURED.items() if abs(share - row.share) <= SAME_SHARE]
        measured = f"{known[0][0]}%, {known[0][1]}%" if known else ""
        if row.name == "dense":
            measured = f"0%, {MEASURED_DENSE}%"
        elif row.plan.config.kv == FEWER_BITS:
            measured = "see below"
        if row.step_s is None:
            table.add_row(name, f"{row.share:.0%}", "0", "does not fit", "", "", measured)
            continue
        speed = f"{dense_s / row.step_s:.2f}x" if dense_s else ""
        times = f"{row.step_s:,.1f}", duration(steps_s(row.plan, gpu))
        table.add_row(name, f"{row.share:.0%}", str(row.plan.slots), *times, speed, measured)
    return table


def winning_budget(plan: Plan, gpu: GPU, dense_s: float | None) -> int:
    """Return the largest budget with which a sparse step is clearly faster than a dense one; 0 if there is none.

    If dense does not fit, return the largest budget that fits.
    """
    least = plan.config.kv.least_budget - 1

    def wins(more: int) -> bool:
        return _faster(_row(plan, gpu, plan.config.kv.changed(budget=least + more)).step_s, dense_s)

    found = largest(wins, plan.config.longest_kept(plan.prompt_tokens) - least)
    return least + found if found else 0


def winning_length(plan: Plan, gpu: GPU) -> int:
    """Return the power of two from which longer responses make a sparse step of the configured budget clearly faster; 0 if the
    longest that fits does not."""
    limit = max(plan.config.rollout.max_tokens, (plan.dims.context or 0) - plan.prompt_tokens)
    found, tokens = 0, 64
    while tokens <= limit:
        sparse, dense = (_row(plan, gpu, kv, tokens).step_s for kv in (plan.config.kv, None))
        if sparse is None:
            break
        found = (found or tokens) if _faster(sparse, dense) else 0
        tokens *= 2
    return found


def _faster(sparse_s: float | None, dense_s: float | None) -> bool:
    return sparse_s is not None and (dense_s is None or sparse_s <= FASTER * dense_s)


def advice(plan: Plan, rows: list[BudgetRow], gpu: GPU) -> str:
    """Return sentences with the budget up to which sparse sampling is faster, and with the results measured at that share."""
    dense_s, kv = rows[-1].step_s, plan.config.kv
    budget, length = winning_budget(plan, gpu, dense_s), winning_length(plan, gpu)
    lengths = f"for responses of about {length:,} tokens or more" if length else "at no length"
    from_length = f"{kv.label} reaches this {lengths}"
    if not budget:
        return f"No budget makes a step {1 - FASTER:.0%} faster than dense; {from_length}. Train dense at this length."
    share = _row(plan, gpu, kv.changed(budget=budget)).share
    than = f"is at least {1 - FASTER:.0%} faster than dense" if dense_s else "fits, and dense does not,"
    return (
        f"A sparse step {than} up to a budget of {budget:,} ({share:.0%} of the longest sequence); {from_length}. "
        f"{evidence(share, kv.policy)}"
    )


def evidence(share: float, policy: str) -> str:
    """Return sentences with the measured training run of the largest share up to `share`, and with the results of this policy."""
    where = "(0.5B, GSM8K, answers of 300 tokens; docs/choosing-a-budget.md)"
    known = [each for each in MEASURED if each <= share + SAME_SHARE]
    at = max(known, default=min(MEASURED))
    rejected, accuracy = MEASURED[at]
    less = "" if known else f"No run with less than {at:.0%} was measured. "
    trained = (
        f"{less}Measured with R-KV at {at:.0%}: {rejected}% of rollouts rejected at first, Pass@1 {accuracy}% after training, "
        f"{MEASURED_DENSE}% dense {where}."
    )
    if policy != "triattention":
        return trained
    by_task = ", ".join(f"{rejected}% of answers to {task}" for task, rejected in MEASURED_TRIATTENTION.items())
    return (
        f"{trained} Before training, TriAttention with a fifth of a response as budget rejects {by_task} "
        "(1.5B, protected prompts; experiments/shootout/README.md). Three runs trained with it (docs/evidence.md)."
    )


def bits_advice(plan: Plan) -> str:
    """Return sentences with the training run that kept all keys in 4 bits, and the length up to which that takes fewer bytes."""
    first, last, trained, dense = MEASURED_BITS
    length, kv = fewer_bits_length(plan), plan.config.kv
    return (
        f"All keys in 4 bits (--kv.policy full --kv.dtype 4bit): {first}% of rollouts rejected at first and {last}% after 20 steps, "
        f"{trained}% right then, {dense}% dense (1.5B, 16 problems in a prompt, answers of 2,500 to 3,800 tokens, two and three "
        "seeds; docs/choosing-a-budget.md). Its bytes grow with the answers"
        + (f": they are fewer than those of {kv.label} up to answers of about {length:,} tokens." if length else ".")
    )


def fewer_bits_length(plan: Plan) -> int:
    """Return the response length up to which all keys in 4 bits take fewer bytes than the configured budget, to two digits.

    A running sequence of final length L holds L / 2 tokens on average, and shares its prompt with the other samples.
    """
    kv, shape, size = plan.config.kv, plan.dims.full, itemsize(plan.config)
    prompt_tokens_per_sample = pages_of(plan.prompt_tokens) * PAGE_TOKENS / plan.config.rollout.samples_per_prompt
    stored = prompt_tokens_per_sample * token_bytes(shape, size, kv.dtype) if kv.stores_prompts else 0
    bytes_per_token = token_bytes(shape, size, FEWER_BITS.dtype)
    free = sum(slot_bytes(shape, kv, size)) + stored - sum(slot_bytes(shape, FEWER_BITS, size))
    length = max(0, int(2 * (free / bytes_per_token - prompt_tokens_per_sample)))
    digits = 10 ** max(0, len(str(length)) - 2)
    return length // digits * digits


def fewer_prompts(plan: Plan, gpu: GPU) -> str | None:
    """Return a sentence with the prompts per step that fill the slots once, if a step is long and fills them several times."""
    rollout, ranks = plan.config.rollout, plan.config.ranks.count
    now_s = step_time(plan, gpu).total_s
    prompts = max(ranks * max(1, plan.running // rollout.samples_per_prompt), plan.config.optimizer.updates_per_step)
    if now_s < LONG_STEP_S or prompts >= rollout.prompts_per_step:
        return None
    made = plan.replanned(plan.config.changed(rollout={"prompts_per_step": prompts}))
    if not made.fits:
        return None
    then_s, steps = step_time(made, gpu).total_s, plan.config.steps
    return (
        f"A step samples {rollout.rollouts_per_step:,} rollouts, {ranks * plan.running:,} at once. With "
        f"--rollout.prompts-per-step {prompts} it takes {duration(then_s)} instead of {duration(now_s)}, "
        f"{counted(steps, 'step')} {duration(steps_s(made, gpu))}; each update then has fewer rollouts."
    )
