"""Decode attention over stored prompts that groups of slots share: read by each slot, or once per group.

    python benchmarks/shared_prompts.py --json benchmarks/results/shared-prompts.json

Shapes of Qwen2.5-1.5B (12 query heads, 2 kv heads) and 7B (28, 4), bfloat16, random keys, slots with 320 to 640 tokens of their own,
groups of 8 slots and of one. Microseconds of one layer, from a CUDA graph over four layers. Needs a GPU.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl.bench.record import environment
from sparse_rl.kernels.rows import StoredPrompts
from sparse_rl.kernels.slot_attention import attend_and_append, splits_for
from sparse_rl.rollout.decode import PROMPT_TOKENS
from sparse_rl.sizes import PAGE_TOKENS, pages_of

HEADS = {"1.5B": (12, 2), "7B": (28, 4)}
DIM, OWN, LAYERS, REPEATS = 128, 640, 4, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for shape in HEADS:
        for slots, members in ((64, 8), (256, 8), (256, 1)):
            for prompt in (256, 1100, 2048, 4096):
                rows.append(measured(shape, slots, members, prompt))
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        record = environment("shared_prompts", torch.device("cuda")) | {
            "seed": 0,
            "unit": "microseconds per layer",
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def measured(shape: str, slots: int, members: int, prompt: int) -> dict[str, Any]:
    step, order_S = attention(*HEADS[shape], slots, members, prompt)
    gap = (step(0, order_S) - step(0, None)).abs().max().item()
    return {
        "shape": shape,
        "slots": slots,
        "members": members,
        "prompt": prompt,
        "alone": microseconds(lambda layer: step(layer, None)),
        "once": microseconds(lambda layer: step(layer, order_S)),
        "largest difference": gap,
    }


def attention(
    q_heads: int, kv_heads: int, slots: int, members: int, prompt: int
) -> tuple[Callable[[int, Tensor | None], Tensor], Tensor]:
    """Return a step of attention for a layer and an order of the slots, and the order of their prompts."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

    new = (normal(slots, q_heads, DIM), normal(slots, kv_heads, DIM), normal(slots, kv_heads, DIM))
    own = [normal(LAYERS, slots, kv_heads, OWN, DIM) for _ in range(2)]
    positions = torch.zeros(LAYERS, slots, kv_heads, OWN, dtype=torch.int32, device="cuda")
    ring = normal(LAYERS, slots, q_heads, 0, DIM)
    lengths_S = torch.randint(OWN // 2, OWN - 1, (slots,), device="cuda", generator=generator)
    pages, groups = pages_of(prompt), -(-slots // members)
    stored = [normal(LAYERS, groups * pages, kv_heads, PAGE_TOKENS, DIM) for _ in range(2)]
    taken = torch.randperm(groups * pages, device="cuda", generator=generator).int().reshape(groups, pages)
    table_SP = taken[torch.arange(slots, device="cuda") // members].contiguous()
    prompts_S = torch.full((slots,), prompt, device="cuda")
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count

    def step(layer: int, order_S: Tensor | None) -> Tensor:
        row_tokens = OWN + (PROMPT_TOKENS if order_S is None else 0)
        return attend_and_append(
            *new,
            *(each[layer] for each in own),
            positions[layer],
            ring[layer],
            lengths_S,
            lengths_S + prompts_S,
            scale=DIM**-0.5,
            splits=splits_for(slots, kv_heads, row_tokens, processors),
            prompts=StoredPrompts(*(each[layer] for each in stored), table_SP, prompts_S, order_S),
        )

    return step, table_SP[:, 0].argsort()


def microseconds(step: Callable[[int], Tensor]) -> float:
    step(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            step(layer)
    for _ in range(3):
        graph.replay()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(REPEATS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return round(began.elapsed_time(ended) / REPEATS / LAYERS * 1e3, 1)


if __name__ == "__main__":
    main()
