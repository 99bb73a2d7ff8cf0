"""Steps on 8 to 1,024 GPUs, computed and not measured: python benchmarks/scaling.py writes the tables of scaling.md.

Memory and the learner are `sparse-rl plan`'s; sampling has its decode steps too, but responses of all lengths: a rank's rollouts
go through its slots one after the other, and steps cost less as slots fall idle. The first table puts the same computation
beside what was measured on one GPU.
"""

import heapq
import json
import random
import re
from pathlib import Path

from sparse_rl.config import KV, Config, migrated_tables
from sparse_rl.plan.dimensions import Dimensions, dimensions
from sparse_rl.plan.memory import CONTEXT_BYTES, Plan, make_plan, rollouts_of_rank
from sparse_rl.plan.parts import itemsize
from sparse_rl.plan.roofline import GPU, GPUS, decode_s, step_time

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "scaling.md"
MEASURED = ROOT / "benchmarks" / "results" / "step-1.5B.json"
SHORTEST = 1 / 16
"""Responses are uniform from this share of the longest."""
COUNTS = (8, 64, 256, 1024)
MODELS = ("7B", "14B", "32B")


def main() -> None:
    page = PAGE.read_text()
    tables = {"measured": measured(), "scaled": scaled(), "72B": largest()}
    for name, table in tables.items():
        page, found = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)",
            lambda block, table=table: block[1] + table + block[2],
            page,
            flags=re.S,
        )
        assert found == 1, name
    PAGE.write_text(page)


def lengths(rollouts: int, longest: int) -> list[int]:
    """In a random order, as nobody knows them beforehand."""
    share = [(SHORTEST + (1 - SHORTEST) * (number + 0.5) / rollouts) for number in range(rollouts)]
    random.Random(0).shuffle(share)
    return [max(1, round(each * longest)) for each in share]


def sampling_s(plan: Plan, gpu: GPU) -> float:
    """Until the last of a rank's rollouts has ended."""
    config, dims, size = plan.config, plan.dims, itemsize(plan.config)
    waiting = lengths(rollouts_of_rank(config), config.rollout.max_tokens)
    running: list[tuple[int, int]] = []  # (step of its end, step of its start)
    now, seconds = 0, 0.0
    while waiting or running:
        while waiting and len(running) < plan.slots:
            heapq.heappush(running, (now + waiting.pop(), now))
        end = running[0][0]
        middle = (now + end) / 2
        held = sum(middle - start for _, start in running) / len(running) + plan.prompt_tokens
        slots = graph_of(len(running), plan.slots)
        seconds += (end - now) * decode_s(dims, slots, in_cache(config.sampler_kv, held), size, gpu)
        now = end
        while running and running[0][0] <= now:
            heapq.heappop(running)
    return seconds


def graph_of(active: int, slots: int) -> int:
    """Slots of the smallest graph that holds them: halves down to 16."""
    graph = slots
    while graph // 2 >= max(16, active):
        graph //= 2
    return graph


def in_cache(kv: KV, tokens: float) -> float:
    return tokens if kv.policy == "full" else min(tokens, kv.budget + kv.interval / 2)


def learner_s(plan: Plan, gpu: GPU) -> tuple[float, float]:
    """(its seconds at mean length, what of it is waiting for the network)."""
    at = step_time(plan, gpu)
    mean = (1 + SHORTEST) / 2
    return (at.old_s + at.update_s - at.exposed_s) * mean + at.exposed_s + at.sync_s, at.exposed_s + at.sync_s


def planned(model: str, count: int, method: str, gpu: GPU, **rollout: int) -> Plan:
    settings = {"prompts_per_step": 1024, "samples_per_prompt": 16, "max_tokens": 16384} | rollout
    config = Config(
        method=method,
        model={"path": model, "dtype": "bfloat16"},
        kv={"policy": "rkv", "protect_prompt": False},
        rollout=settings,
        eval={"problems": 0},
        optimizer={"gradient_checkpointing": True, "tokens_per_microbatch": 32768},
        ranks={"count": count, "hold_gradients": False},
    )
    return make_plan(config, dimensions(model), memory_bytes=gpu.memory_bytes - CONTEXT_BYTES)


def scaled(gpu: GPU = GPUS["h200"]) -> str:
    lines = [
        "| model | GPUs | slots | sampling | learner | step | dense slots | dense step | dense / sparse |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for count in COUNTS:
            cells, steps = [model, str(count)], []
            for method in ("sparse_rl", "dense"):
                plan = planned(model, count, method, gpu)
                if not plan.fits:
                    cells += ["does not fit", "", "", ""] if method == "sparse_rl" else ["does not fit", ""]
                    continue
                sampling, (learner, _) = sampling_s(plan, gpu), learner_s(plan, gpu)
                steps.append(sampling + learner)
                middle = [f"{sampling:,.0f} s", f"{learner:,.0f} s"] if method == "sparse_rl" else []
                cells += [str(plan.slots), *middle, f"{sampling + learner:,.0f} s"]
            cells.append(f"{steps[1] / steps[0]:.1f}x" if len(steps) == 2 else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured() -> str:
    """The whole step at 1.5B shapes on one H200, computed and measured."""
    found, gpu = json.loads(MEASURED.read_text()), GPUS["h200"]
    lines = ["| sampler | | sampling | old log-probs | update |", "|---|---|---|---|---|"]
    for arm in found["arms"]:
        config = Config(**migrated_tables(found["config"]) | {"method": arm["method"]})
        plan = make_plan(config, dimensions("1.5B"), slots=arm["slots"], prompt_tokens=found["prompt_tokens"])
        at, mean, last = step_time(plan, gpu), (1 + SHORTEST) / 2, arm["steps"][-1]
        sampled = sum(last[part] for part in ("prefill", "decode", "compaction", "host"))
        lines.append(
            f"| {arm['method']} | computed | {sampling_s(plan, gpu):.1f} s | {at.old_s * mean:.1f} s | {at.update_s * mean:.1f} s |"
        )
        lines.append(f"| | measured | {sampled:.1f} s | {last['old log-probs']:.1f} s | {last['update']:.1f} s |")
    return "\n".join(lines)


def largest() -> str:
    dims: Dimensions = dimensions("72B")
    whole = 2 * dims.params / 2**30
    lines = ["| GPU | memory | fits on 64 | on 256 |", "|---|---|---|---|"]
    for name in ("h100", "h200", "b200"):
        gpu = GPUS[name]
        fits = [planned("72B", count, "sparse_rl", gpu) for count in (64, 256)]
        cells = [f"{plan.slots} slots" if plan.fits else "no" for plan in fits]
        lines.append(f"| {gpu.name} | {gpu.memory_bytes / 2**30:.0f} GiB | {' | '.join(cells)} |")
    return f"72B has {whole:.0f} GiB of weights in bfloat16.\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
