"""Suggest options for a run that does not fit in memory. Every suggestion is first checked with the plan."""

from typing import Any

from ..config import Config
from .memory import Plan, auto_limit, make_plan, most_slots
from .parts import itemsize, sharded

NAMED = 4
"""Maximum number of suggestions."""
SAFETY_SHARE = 0.9
"""If memory ran out although the plan fits, a suggestion must reduce the planned memory to this share."""

TOO_LARGE = "the model is too large for one GPU, and every rank samples from a full copy: use a smaller model or a larger GPU"

Edit = tuple[str, dict[str, Any]]


def remedies(plan: Plan, *, ran_out: bool = False) -> list[str]:
    """Return alternative flags, each of which alone makes the run fit.

    If no single change suffices, return one combination of flags. Return an empty list if no combination suffices either.
    """
    limit = plan.memory_bytes
    assert limit is not None
    if ran_out:
        limit = min(limit, int(SAFETY_SHARE * plan.needed_bytes))
    edits = _edits(plan.config, plan.prompt_tokens)
    found = []
    fewer = _most_slots(plan.config, plan, limit)
    if 0 < fewer < plan.slots:
        found.append(f"--rollout.slots {fewer}")
    for variants in edits:
        found += [flags for flags, change in variants if _fits(_edited(plan.config, change), plan, limit)][:1]
    return found[:NAMED] or _together(plan, edits, limit)


def sentence(plan: Plan, *, ran_out: bool = False) -> str:
    """Return a sentence with the remedies (`by the plan it fits with --rollout.slots 48, or …`), or that nothing fits."""
    found = remedies(plan, ran_out=ran_out)
    if plan.config.ranks.count > 1 and plan.dims.params * itemsize(plan.config) > (plan.memory_bytes or 0):
        return TOO_LARGE
    if not found:
        return "no option of the plan makes the run fit: use a smaller model or a larger GPU"
    return f"the plan fits with {', or '.join(found)}"


def _together(plan: Plan, edits: list[list[Edit]], limit: int) -> list[str]:
    """Apply the strongest edit of each kind, one after the other, until the run fits. Return the flags in one string."""
    config, flags = plan.config, []
    for variants in edits:
        flag, change = variants[-1]
        flags.append(flag)
        config = _edited(config, change)
        if slots := _most_slots(config, plan, limit):
            few = [f"--rollout.slots {slots}"] if slots < plan.slots and plan.config.rollout.slots != "auto" else []
            return [" ".join([*flags, *few])]
    return []


def _edits(config: Config, prompt_tokens: int) -> list[list[Edit]]:
    """Return the possible edits by kind, from the cheapest kind to the costliest. Each kind lists its edits mildest first."""
    optimizer, lora = config.optimizer, config.model.lora
    found: list[list[Edit]] = []
    if not optimizer.gradient_checkpointing:
        found.append([("--optimizer.gradient-checkpointing true", {"optimizer": {"gradient_checkpointing": True}})])
    longest, tokens, smaller = prompt_tokens + config.rollout.max_tokens, optimizer.tokens_per_microbatch, []
    while tokens > longest:
        tokens = max(longest, tokens // 2)
        smaller.append((f"--optimizer.tokens-per-microbatch {tokens}", {"optimizer": {"tokens_per_microbatch": tokens}}))
    if smaller:
        found.append(smaller)
    if sharded(config) and config.ranks.hold_gradients:
        found.append([("--ranks.hold-gradients false", {"ranks": {"hold_gradients": False}})])
    if lora.rank and lora.merge:
        found.append([("--model.lora.merge false", {"model": {"lora": {"merge": False}}})])
    states = {"fp32": ("8bit", "offload"), "8bit": ("offload",), "offload": ()}[optimizer.state]
    states = tuple(state for state in states if state != "offload" or not sharded(config))
    if states:
        found.append([(f"--optimizer.state {state}", {"optimizer": {"state": state}}) for state in states])
    if not lora.rank:
        merged = ("--model.lora.rank 16", {"model": {"lora": {"rank": 16}}})
        apart = ("--model.lora.rank 16 --model.lora.merge false", {"model": {"lora": {"rank": 16, "merge": False}}})
        found.append([merged, apart])
    if config.rollout.max_tokens > 1024:
        shorter = config.rollout.max_tokens // 2
        found.append([(f"--rollout.max-tokens {shorter}", {"rollout": {"max_tokens": shorter}})])
    return found


def _edited(config: Config, change: dict[str, Any]) -> Config:
    update: dict[str, Any] = {}
    for name, values in change.items():
        section = getattr(config, name)
        inner = {
            key: getattr(section, key).model_copy(update=value) if isinstance(value, dict) else value
            for key, value in values.items()
        }
        update[name] = section.model_copy(update=inner)
    return config.model_copy(update=update)


def _fits(config: Config, plan: Plan, limit: int) -> bool:
    slots = None if plan.config.rollout.slots == "auto" else plan.slots
    return make_plan(config, plan.dims, memory_bytes=limit, prompt_tokens=plan.prompt_tokens, slots=slots).fits


def _most_slots(config: Config, plan: Plan, limit: int) -> int:
    return most_slots(config, plan.dims, limit, plan.prompt_tokens, min(plan.slots, auto_limit(config)))
