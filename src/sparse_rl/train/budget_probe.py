"""Measure before the first step which budget a run needs: sample with several budgets and compare with the dense model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from transformers import PreTrainedModel

from ..config import KV, CorrectionSpec, Sampling
from ..errors import UserError
from ..format import size
from ..kernels.counter_rng import derive
from ..learner.mismatch import measure
from ..learner.replay import replay
from ..monitor.budget import Figures, Targets
from ..rollout.clock import device_time
from ..rollout.engine import Engine
from ..world import World

ROLLOUTS = 128
"""Rollouts of a probe at one budget. With a target of 2 %, two of them may be rejected."""
MIN_PROMPTS = 16
"""Prompts of a probe, at least. Rollouts of one prompt are rejected together, so few prompts would say little about the others."""
PROBED = 2**41
"""Counter of the seeds of probes. Training rollouts count prompts from 0."""


@dataclass(frozen=True)
class ProbeRow:
    """Figures at one budget, and what its cache costs."""

    budget: int
    figures: Figures
    k3: float
    kv_bytes: int
    slots: int
    seconds: float
    compactions: int
    """Compactions of all rollouts. If there are none, the figures are those of a cache that keeps all keys."""


@torch.no_grad()
def probe_budget(
    engine: Engine,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    spec: CorrectionSpec,
    *,
    tokens_per_pass: int,
    world: World,
    routing: bool = False,
) -> ProbeRow:
    """Sample at most `samples` responses to each of evenly spaced prompts at the engine's budget, on all ranks together.

    Compare their log-probs with those of the dense model, which uses their expert choices if `routing` is set. All budgets
    use the same seeds.
    """
    started = device_time(model.device)
    samples = min(samples, max(1, ROLLOUTS // MIN_PROMPTS))
    count = -(-ROLLOUTS // samples)
    spaced = [number * len(prompts) // count for number in range(count)]
    mine = range(world.rank, count, world.size)
    seeds = [derive(sampling.seed, PROBED + number, sample) for number in mine for sample in range(samples)]
    own, compactions = [], 0
    if mine:
        asked = [prompts[spaced[number]] for number in mine]
        rollouts = engine.generate(asked, samples, sampling, seeds=seeds, record=False, routing=routing)
        dense = replay(model, rollouts, "dense", tokens_per_pass=tokens_per_pass)
        own = [each.cpu() - rollout.logprobs for each, rollout in zip(dense, rollouts, strict=True)]
        compactions = engine.stats.compactions
    found = measure([each for part in world.gather(own) for each in part], spec)
    kept, k3, seconds = engine.kv.kept_tokens, found.metrics["sparse/mismatch_k3"], device_time(model.device) - started
    compactions = sum(world.gather(compactions))
    return ProbeRow(kept, found.figures, k3, engine.cache.kv_bytes, engine.slots, seconds, compactions)


def probe_table(rows: Sequence[ProbeRow], targets: Targets, found: int | None) -> Table:
    table = Table(title=f"kv.budget = auto: the smallest budget with {targets}", title_justify="left")
    headings = ("budget", targets.judged, "xi p05, long responses", "k3", "response tokens, p90", "slots", "KV", "seconds", "")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        each = row.figures
        cells = [f"{row.budget:,}", f"{each.rejected:.1%}", f"{each.tail:.2f}", f"{row.k3:.1e}", f"{each.tokens:,}"]
        mark = "chosen" if row.budget == found else "" if targets.met_by(each) else "missed"
        table.add_row(*cells, str(row.slots), size(row.kv_bytes), f"{row.seconds:.1f}", mark)
    return table


def unreachable(row: ProbeRow, targets: Targets, kv: KV, *, memory_limits: bool) -> UserError:
    """Return the error of a probe in which no budget meets the targets. `row` has the largest budget."""
    limit = "the most that fits in memory" if memory_limits else "the longest sequence"
    found = f"{row.figures.rejected:.1%} {targets.judged}, xi p05 of long responses {row.figures.tail:.2f}"
    return UserError(
        f"No budget up to {row.budget:,} tokens, {limit}, has {targets} (found: {found}): {remedy(kv, memory_limits)}."
    )


def remedy(kv: KV, memory_limits: bool) -> str:
    """Return what to do if the largest budget misses the targets. `memory_limits` is true if longer sequences need a larger one."""
    ways = ["lower rollout.max_tokens", "use another kv.policy"]
    ways += [] if kv.protect_prompt else ["set kv.protect_prompt = true"]
    if memory_limits and not kv.quantised and not kv.has_custom_policy:
        ways.append("set kv.dtype = 8bit")  # room for about twice the budget
    elif kv.quantised and not memory_limits:
        ways.append("set kv.dtype = auto")
    return f"{', '.join(ways)}, raise kv.target_rejected, or lower alerts.xi_p05"
