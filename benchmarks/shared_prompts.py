"""Decode attention over stored prompts that groups of slots share: read by each slot, or once per group.

    python benchmarks/shared_prompts.py --json benchmarks/results/shared-prompts.json

Shapes of Qwen2.5-1.5B (12 query heads, 2 kv heads) and 7B (28, 4), random keys in bfloat16, in 8 and in 4 bits, slots with 320
to 640 tokens of their own. Groups have 8 slots, or 1 to 8, because the samples of a run end one by one. Microseconds of one
layer, from a CUDA graph over four layers. Needs a GPU.
"""

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl.bench.record import environment
from sparse_rl.kernels.code_attention import attend_and_append_codes
from sparse_rl.kernels.prompt_readers import members_of, prompt_readers
from sparse_rl.kernels.rows import StoredCodes, StoredPrompts
from sparse_rl.kernels.slot_attention import attend_and_append, splits_for
from sparse_rl.rollout.decode import PROMPT_TOKENS
from sparse_rl.sizes import PAGE_TOKENS, pages_of

HEADS = {"1.5B": (12, 2), "7B": (28, 4)}
BITS = {"auto": 16, "8bit": 8, "4bit": 4}
SLOTS = ((64, 8, 8), (256, 8, 8), (256, 1, 8))
"""Slots, and the fewest and most slots of a group."""
PROMPTS = (256, 1100, 2048, 4096)
DIM, OWN, LAYERS, REPEATS = 128, 640, 4, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for dtype, shape, (slots, fewest, most), prompt in product(args.dtypes, HEADS, SLOTS, PROMPTS):
        rows.append(measured(dtype, shape, slots, fewest, most, prompt))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        record = environment("shared_prompts", torch.device("cuda")) | {
            "seed": 0,
            "unit": "microseconds per layer",
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def measured(dtype: str, shape: str, slots: int, fewest: int, most: int, prompt: int) -> dict[str, Any]:
    step, readers_AM = attention(BITS[dtype], *HEADS[shape], slots, fewest, most, prompt)
    gap = (step(0, readers_AM) - step(0, None)).abs().max().item()
    return {
        "dtype": dtype,
        "shape": shape,
        "slots": slots,
        "group": [fewest, most],
        "prompt": prompt,
        "alone": microseconds(lambda layer: step(layer, None)),
        "once": microseconds(lambda layer: step(layer, readers_AM)),
        "largest difference": gap,
    }


def attention(
    bits: int, q_heads: int, kv_heads: int, slots: int, fewest: int, most: int, prompt: int
) -> tuple[Callable[[int, Tensor | None], Tensor], Tensor]:
    """Return a step of attention for a layer and programs that read prompts, and these programs."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

    def held(rows: int, tokens: int) -> tuple[Tensor, ...]:
        """Keys and values of all layers, or their codes and the steps of both."""
        size = (LAYERS, rows, kv_heads, tokens)
        if bits == 16:
            return normal(*size, DIM), normal(*size, DIM)
        codes = [
            torch.randint(256, (*size, DIM * bits // 8), device="cuda", generator=generator).to(torch.uint8) for _ in "kv"
        ]
        steps = [torch.full((*size, 1 if bits == 8 else DIM // 32), 2 / 2**bits, device="cuda").half() for _ in "kv"]
        return *(each.view(torch.int8) if bits == 8 else each for each in codes), *steps

    new = (normal(slots, q_heads, DIM), normal(slots, kv_heads, DIM), normal(slots, kv_heads, DIM))
    own = held(slots, OWN)
    positions = torch.zeros(LAYERS, slots, kv_heads, OWN, dtype=torch.int32, device="cuda")
    ring = normal(LAYERS, slots, q_heads, 0, DIM)
    lengths_S = torch.randint(OWN // 2, OWN - 1, (slots,), device="cuda", generator=generator)
    sizes_n = torch.randint(fewest, most + 1, (slots,), device="cuda", generator=generator)
    group_S = (torch.arange(slots, device="cuda")[:, None] >= sizes_n.cumsum(0)).sum(dim=1)
    pages, groups = pages_of(prompt), int(group_S[-1]) + 1
    stored = held(groups * pages, PAGE_TOKENS)
    taken = torch.randperm(groups * pages, device="cuda", generator=generator).int().reshape(groups, pages)
    table_SP = taken[group_S].contiguous()
    prompts_S = torch.full((slots,), prompt, device="cuda")
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    static = torch.zeros(kv_heads, DIM, device="cuda"), torch.ones(kv_heads, DIM, device="cuda")

    def step(layer: int, readers_AM: Tensor | None) -> Tensor:
        row_tokens = OWN + (PROMPT_TOKENS if readers_AM is None else 0)
        splits = splits_for(slots, kv_heads, row_tokens, processors)
        cached, pool = (tuple(each[layer] for each in tensors) for tensors in (own, stored))
        places = (positions[layer], ring[layer], lengths_S, lengths_S + prompts_S)
        if bits == 16:
            prompts = StoredPrompts(*pool, table_SP, prompts_S, readers_AM)
            return attend_and_append(*new, *cached, *places, scale=DIM**-0.5, splits=splits, prompts=prompts)
        codes = StoredCodes(pool, table_SP, prompts_S, readers_AM)
        return attend_and_append_codes(*new, cached, *places, *static, scale=DIM**-0.5, splits=splits, prompts=codes)

    return step, prompt_readers(table_SP, prompts_S, members_of(q_heads // kv_heads))


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
