"""Suggest options for a run that does not fit in memory. Every suggestion is first checked with the plan."""

from dataclasses import dataclass
from itertools import product
from typing import Any

from ..config import Config
from ..format import duration, gib
from .evaluation import without_evaluation
from .host import host_plan
from .memory import Plan, auto_limit, make_plan, most_slots
from .microbatch import rollouts_of_rank
from .parts import itemsize, sharded
from .roofline import GPU, nearest_gpu, step_time

NAMED = 3
"""Maximum number of suggestions that train the same weights. One with adapters is added."""
SAFETY_SHARE = 0.9
"""If memory ran out although the plan fits, a suggestion must reduce the planned memory to this share."""
WORTH_SHARE = 0.9
"""A further option must reduce the step time to this share."""
FASTER_SHARE = 0.5
"""If the run fits, options are suggested that reduce the step time to this share."""

TOO_LARGE = "the model is too large for one GPU, and every rank samples from a full copy: use a smaller model or a larger GPU"

Edit = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Remedy:
    """Flags with which the run fits, its plan, and the computed time of a step."""

    flags: str
    plan: Plan
    step_s: float
    strengths: tuple[int, ...]
    """Position of the chosen edit in each kind, from 1 for the mildest; 0 if the kind is not edited."""
    adapters: bool = False
    """True if the flags train adapters instead of all weights."""

    def is_dominated_by(self, other: "Remedy") -> bool:
        """Return whether `other` changes less and is about as fast."""
        milder = all(theirs <= ours for theirs, ours in zip(other.strengths, self.strengths, strict=True))
        return milder and other != self and self.step_s > WORTH_SHARE * other.step_s


def remedies(plan: Plan, gpu: GPU, *, ran_out: bool = False, host_bytes: int | None = None) -> list[Remedy]:
    """Return alternative flags with which the run fits, the shortest step first. Each may combine several options.

    All combinations are tried. Responses are shortened only if nothing else fits. `host_bytes` is the memory of the machine,
    if known.
    """
    limit = plan.memory_bytes
    assert limit is not None
    if ran_out:
        limit = min(limit, int(SAFETY_SHARE * plan.needed_bytes))
    kinds = _edits(plan.config, plan.prompt_tokens, takes_4bit=plan.dims.takes_4bit_base, takes_codes=plan.dims.takes_codes)
    found = _search(plan, gpu, kinds, limit, ran_out=ran_out, host_bytes=host_bytes)
    if not found and (shorter := _shorter(plan.config)):
        found = _search(plan, gpu, [*kinds, *shorter], limit, ran_out=ran_out, host_bytes=host_bytes)
    return _best(found)


def _search(
    plan: Plan, gpu: GPU, kinds: list[list[Edit]], limit: int, *, ran_out: bool, host_bytes: int | None
) -> list[Remedy]:
    """Combine at most one edit of each kind. Return the combinations with which the run fits."""
    found = []
    for strengths in product(*(range(len(kind) + 1) for kind in kinds)):
        edits = [kind[strength - 1] for kind, strength in zip(kinds, strengths, strict=True) if strength]
        fitted = _fitted(plan, edits, limit, ran_out=ran_out)
        if fitted is None or (host_bytes is not None and host_plan(fitted[1]).peak_bytes > host_bytes):
            continue
        flags, made = fitted
        adapters = made.config.model.lora.rank > plan.config.model.lora.rank
        found.append(Remedy(flags, made, step_time(made, gpu).total_s, strengths, adapters))
    return found


def sentence(plan: Plan, *, ran_out: bool = False, host_bytes: int | None = None) -> str:
    """Return a sentence with the remedies (`the plan fits with --rollout.slots 48, or …`), or that nothing fits."""
    found = remedies(plan, nearest_gpu(plan.memory_bytes or 0), ran_out=ran_out, host_bytes=host_bytes)
    return (
        f"the plan fits with {', or '.join(each.flags for each in found)}"
        if found
        else nothing_fits(plan, host_bytes, ran_out=ran_out)
    )


def timed_sentence(plan: Plan, found: list[Remedy], host_bytes: int | None = None) -> str:
    """Return a sentence with the remedies and their times (`the plan fits with --rollout.slots 48 (40 min a step), or …`), or that
    nothing fits. Remedies that need more host memory than the plan name it."""
    planned = host_plan(plan).peak_bytes
    shown = []
    for each in found:
        needed = host_plan(each.plan).peak_bytes
        host = f", {gib(needed)} GiB of host memory" if needed > planned else ""
        shown.append(f"{each.flags} ({duration(each.step_s)} a step{host})")
    return f"the plan fits with {', or '.join(shown)}" if found else nothing_fits(plan, host_bytes)


def nothing_fits(plan: Plan, host_bytes: int | None = None, *, ran_out: bool = False) -> str:
    """Return a sentence that no option helps. `host_bytes` is the memory of the machine, if it limited the options."""
    if plan.config.ranks.count > 1 and plan.dims.params * itemsize(plan.config) > (plan.memory_bytes or 0):
        return TOO_LARGE
    if host_bytes is not None and (found := remedies(plan, nearest_gpu(plan.memory_bytes or 0), ran_out=ran_out)):
        least = min(found, key=lambda each: host_plan(each.plan).peak_bytes)
        needed = gib(host_plan(least.plan).peak_bytes)
        return (
            f"{least.flags} fits, but needs {needed} GiB of host memory, and the machine has {gib(host_bytes)} GiB: use a larger "
            "machine"
        )
    return "no option of the plan makes the run fit: use a smaller model or a larger GPU"


def faster(plan: Plan, gpu: GPU, host_bytes: int | None = None) -> Remedy | None:
    """Return flags with which a step of a run that fits takes half the time; None if there are none, or if all rollouts already
    run at once. `host_bytes` is the memory of the machine, if known."""
    if plan.running >= rollouts_of_rank(plan.config):
        return None
    now_s = step_time(plan, gpu).total_s
    for each in remedies(plan, gpu, host_bytes=host_bytes):
        if each.plan.config.model.lora == plan.config.model.lora and each.step_s < FASTER_SHARE * now_s:
            return each
    return None


def _best(found: list[Remedy]) -> list[Remedy]:
    found = [each for each in found if not any(each.is_dominated_by(other) for other in found)]
    found.sort(key=lambda each: each.step_s)
    same = [each for each in found if not each.adapters][:NAMED]
    adapters = [each for each in found if each.adapters][:1]
    return sorted(same + adapters, key=lambda each: each.step_s)


def _fitted(plan: Plan, edits: list[Edit], limit: int, *, ran_out: bool) -> tuple[str, Plan] | None:
    """Return (flags, plan) of the run with these edits; None if it does not fit. The flags name the slots if they are fixed or
    must stay below those with which memory ran out."""
    config = without_evaluation(plan.config)
    for _, change in edits:
        config = config.changed(**change)
    flags, slots = [flag for flag, _ in edits], None
    if ran_out or plan.config.rollout.slots != "auto":
        most = min(plan.slots, auto_limit(config))
        slots = most_slots(config, plan.dims, limit, plan.prompt_tokens, most)
        if slots == 0:
            return None
        if slots < plan.slots:
            flags.append(f"--rollout.slots {slots}")
    made = make_plan(config, plan.dims, memory_bytes=limit, prompt_tokens=plan.prompt_tokens, slots=slots)
    return (" ".join(flags), made) if made.fits and flags else None


def _edits(config: Config, prompt_tokens: int, *, takes_4bit: bool, takes_codes: bool) -> list[list[Edit]]:
    """Return the possible edits by kind. Each kind lists its edits mildest first. Adapters are the last kind. Experts cannot be
    stored in 4 bits."""
    optimizer, lora, kv = config.optimizer, config.model.lora, config.sampler_kv
    found: list[list[Edit]] = []
    if takes_codes and kv.is_sparse and kv.dtype == "auto" and not kv.has_custom_policy:
        found.append([("--kv.dtype 8bit", {"kv": {"dtype": "8bit"}})])
    if not optimizer.gradient_checkpointing:
        found.append([("--optimizer.gradient-checkpointing auto", {"optimizer": {"gradient_checkpointing": "auto"}})])
    longest, tokens, smaller = prompt_tokens + config.rollout.max_tokens, optimizer.tokens_per_microbatch, []
    while tokens > longest:
        tokens = max(longest, tokens // 2)
        smaller.append((f"--optimizer.tokens-per-microbatch {tokens}", {"optimizer": {"tokens_per_microbatch": tokens}}))
    if smaller:
        found.append(smaller)
    if sharded(config) and config.ranks.hold_gradients:
        found.append([("--ranks.hold-gradients false", {"ranks": {"hold_gradients": False}})])
    lighter: list[Edit] = []
    if lora.merges_copy:
        lighter.append(("--model.lora.merge false", {"model": {"lora": {"merge": False}}}))
    if lora.rank and lora.base == "auto" and takes_4bit:
        lighter.append(("--model.lora.base 4bit", {"model": {"lora": {"base": "4bit"}}}))
    if lighter:
        found.append(lighter)
    states = {"fp32": ("8bit", "offload"), "8bit": ("offload",), "offload": ()}[optimizer.state]
    states = tuple(state for state in states if state != "offload" or not sharded(config))
    if states:
        found.append([(f"--optimizer.state {state}", {"optimizer": {"state": state}}) for state in states])
    if not lora.rank:
        merged = ("--model.lora.rank 16", {"model": {"lora": {"rank": 16}}})
        unmerged = ("--model.lora.rank 16 --model.lora.merge false", {"model": {"lora": {"rank": 16, "merge": False}}})
        quantized = ("--model.lora.rank 16 --model.lora.base 4bit", {"model": {"lora": {"rank": 16, "base": "4bit"}}})
        found.append([merged, unmerged, quantized] if takes_4bit else [merged, unmerged])
    return found


def _shorter(config: Config) -> list[list[Edit]]:
    half = config.rollout.max_tokens // 2
    if half < max(512, config.advantage.overlong):
        return []
    return [[(f"--rollout.max-tokens {half}", {"rollout": {"max_tokens": half}})]]
