"""Compute what the held-out evaluation of a run costs: rollouts, slots, computed time and its share of the run."""

from dataclasses import dataclass

from ..config import KV, Config
from ..sizes import live_dense_pages, pages_of, pool_pages, running_in_pages
from .memory import Plan
from .roofline import GPU, decode_all_s, decode_in_pages_s, prefill_s, steps_s


@dataclass(frozen=True)
class EvaluationTime:
    """One evaluation of all held-out sets with one cache, if every response has `max_tokens` tokens."""

    cache: str
    rollouts: int
    """Rollouts on all sets; fewer if a set has fewer than `eval.problems` problems."""
    slots: int
    """Slots that run at once on each GPU."""
    seconds: float


def evaluation_times(plan: Plan, gpu: GPU) -> list[EvaluationTime]:
    """Return the computed time of an evaluation with each cache. The sets are evaluated in turn, shared by the ranks."""
    config = plan.config
    sets, problems = len(config.data.held_out), config.evaluated_problems
    rank_problems = -(-problems // config.ranks.count)
    found = []
    for cache in plan.evaluation_caches:
        kv = config.sampler_kv if cache == "sparse" else KV(policy="full")
        sampler_alone = config.eval.slots == "auto" and kv == config.sampler_kv
        slots = min(sampler_slots(plan) if sampler_alone else plan.evaluation_slots, rank_problems)
        running = running_dense(plan, slots, rank_problems, sampler_alone) if kv.policy == "full" else slots
        if running < slots:
            decoding = decode_in_pages_s(plan, gpu, rank_problems, running, kv, samples=1)
        else:
            decoding = decode_all_s(plan, gpu, rank_problems, slots, kv, samples=1)
        seconds = sets * (decoding + prefill_s(plan, gpu, rank_problems))
        found.append(EvaluationTime(cache, sets * problems, slots, seconds))
    return found


def running_dense(plan: Plan, slots: int, problems: int, sampler_alone: bool) -> int:
    """Return how many problems run at once in the pages of a dense cache: of the sampler's, or of the evaluation's own, which
    hold the live tokens of responses of uniform lengths."""
    prompt, longest = plan.prompt_tokens, plan.config.rollout.max_tokens
    pages = plan.pages if sampler_alone else live_dense_pages(prompt, longest, slots, 1)
    return running_in_pages(pages, [prompt] * problems, longest, slots, 1)


def sampler_slots(plan: Plan) -> int:
    """Return the problems that have a slot at once in the sampler's cache: one per slot, or as many as its pages hold prompts."""
    rollout = plan.config.rollout
    if not plan.config.sampler_kv.stores_prompts:
        return plan.slots
    pages = pool_pages([plan.prompt_tokens] * rollout.prompts_per_step, plan.slots, rollout.samples_per_prompt)
    return max(1, min(plan.slots, max(pages, plan.evaluation_pages) // pages_of(plan.prompt_tokens)))


def evaluations(config: Config) -> int:
    """Return the number of evaluations: one before training, and those of `Config.evaluates_after`."""
    if not config.evaluated_problems:
        return 0
    every = config.eval.every or config.steps
    return 1 + -(-config.steps // every)


def without_evaluation(config: Config) -> Config:
    """Return the config without evaluations of automatic size: they take no memory from a step, but make planning slower."""
    return config.changed(eval={"problems": 0}) if config.eval.slots == "auto" else config


def run_s(plan: Plan, gpu: GPU) -> float:
    """Return the seconds of all steps and evaluations. A comparison counts every method like the planned one."""
    evaluation_s = sum(each.seconds for each in evaluation_times(plan, gpu))
    return steps_s(plan, gpu) + evaluation_s * evaluations(plan.config) * max(1, len(plan.config.compare))


def share_of_run(plan: Plan, gpu: GPU) -> float:
    """Return the share of all evaluations in the time of all steps and evaluations."""
    return 1 - steps_s(plan, gpu) / run_s(plan, gpu)
