"""Decode speed on one GPU over slots and response lengths, sparse against dense in the same KV memory, and what it costs
in exactness: python benchmarks/speed.py [--json FILE] [--model 1.5B], then
python benchmarks/speed.py --plot benchmarks/results/speed.json --out docs/performance.svg

Sparse: tokens/s of whole decode steps once every slot has been compacted (compaction and host included). Dense: as many
sequences as a paged cache with shared prompts (groups of 8) runs in the same memory at the lengths they have at a moment,
E[L^2] / (2 E[L]) for final lengths L; its figure is sequences over the time of a decode step that reads prompt and response.
The sparse side is charged its side tables, the dense side no waste, no preemption, no compaction and no host. Responses are
uniform from a sixteenth of the longest to all of it.
"""

import argparse
import gc
import json
from pathlib import Path

import torch

from sparse_rl import KV, Engine, Sampling, load_model, replay
from sparse_rl.bench.lengths import drawn_lengths, live_tokens, mean_response_tokens_held
from sparse_rl.bench.record import environment
from sparse_rl.bench.rollout import Meter, decode_step_s, share_of_roofline
from sparse_rl.models.shapes import random_model
from sparse_rl.plan.roofline import mean_held

PROMPT_TOKENS = 256
LENGTHS = (1024, 4096, 16384, 32768)
SLOTS = (32, 64, 128, 256, 512, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="1.5B")
    parser.add_argument("--slots", type=int, nargs="+", default=SLOTS)
    parser.add_argument("--only-sweep", action="store_true", help="measure no exactness; what the file has of it stays")
    parser.add_argument("--plot", type=Path, help="draw this JSON and do nothing else")
    parser.add_argument("--out", type=Path, default=Path("docs/performance.svg"))
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.plot.read_text()), args.out)
        return
    kv = KV(policy="rkv", protect_prompt=False)
    model = random_model(args.model, dtype=torch.bfloat16, device="cuda", seed=0)
    result = environment("speed", model.device) | {"model": args.model, "dtype": "bfloat16", "seed": 0, "kv": kv.model_dump()}
    result["prompt_tokens"] = PROMPT_TOKENS
    if args.json and args.json.exists():
        result = json.loads(args.json.read_text()) | result
    measures = {
        "noise_by_length": lambda: noise(model, kv),
        "parting": lambda: {"tiny": parting(load_model("tiny", dtype="bfloat16", device="cuda"))},
        "parting_random_weights": lambda: {args.model: parting(model)},
        "float32": float32_gap,
    }
    for key, measure in {} if args.only_sweep else measures.items():
        result[key] = measure()
        result["exactness_date"] = result["date"]
    result["sweep"] = []
    for slots in args.slots:
        result["sweep"] += sweep(model, kv, slots)
        if args.json:  # as it comes: the sweep takes minutes
            args.json.write_text(json.dumps(result, indent=1) + "\n")


def prompts(model, count: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    vocab = model.config.get_text_config().vocab_size
    return torch.randint(vocab, (count, tokens), generator=torch.Generator().manual_seed(1)).tolist()


def sweep(model, kv: KV, slots: int) -> list[dict]:
    """One row for each length; the sparse figure is the same in all of them, for its cache does not grow."""
    engine = Engine(model, kv, slots=slots)
    steps = kv.capacity - PROMPT_TOKENS + 2 * kv.interval + 1
    engine.generate(prompts(model, slots), sampling=Sampling(max_tokens=kv.capacity - PROMPT_TOKENS + 2, stop=()))
    meter = Meter(engine, slots)
    engine.generate(prompts(model, slots), sampling=Sampling(max_tokens=steps, stop=()), progress=meter)
    sparse = meter.tokens_per_s()
    stats, held = engine.stats, mean_held(kv, PROMPT_TOKENS, steps, steps / 2)
    row = {
        "slots": slots,
        "kv_bytes": stats.peak_kv_bytes,
        "side_bytes": stats.side_bytes,
        "held_tokens": held,
        "sparse_tokens_per_s": sparse,
        "roofline_share": share_of_roofline(model, kv, slots, held, sparse),
        "compaction_share": stats.compaction_s / (stats.seconds - stats.prefill_s),
        "host_share": stats.host_s / (stats.seconds - stats.prefill_s),
    }
    token_bytes = engine.cache.dense_token_bytes
    del engine
    rows = []
    for longest in LENGTHS:
        lengths = drawn_lengths(range(4096), longest)
        live = live_tokens(lengths, PROMPT_TOKENS)
        dense_slots = max(1, int((row["kv_bytes"] + row["side_bytes"]) / (token_bytes * live)))
        dense_held = int(PROMPT_TOKENS + mean_response_tokens_held(lengths))
        dense = dense_slots / dense_step_s(model, dense_slots, dense_held)
        rows.append(
            row
            | {"max_tokens": longest, "live_tokens": live, "dense_held_tokens": dense_held}
            | {"dense_slots": dense_slots, "dense_tokens_per_s": dense}
        )
        print(
            f"{slots:5} slots, up to {longest:6} tokens: sparse {sparse:9,.0f} tok/s, dense {dense:9,.0f} ({dense_slots} slots), "
            f"{sparse / dense:.1f}x, compaction {row['compaction_share']:.1%}, host {row['host_share']:.1%}",
            flush=True,
        )
    return rows


def dense_step_s(model, slots: int, held: int) -> float:
    """Measure the seconds of a dense decode step of slots that hold so many tokens."""
    gc.collect()
    torch.cuda.empty_cache()
    engine = Engine(model, KV(policy="full"), slots=slots)
    engine.reserve_dense(PROMPT_TOKENS, held - PROMPT_TOKENS + engine.chunk, slots, 1)
    return decode_step_s(engine, held)


@torch.no_grad()
def noise(model, kv: KV) -> dict:
    """|sampler - replay| of log-probs in bfloat16, by position in the response."""
    engine = Engine(model, kv, slots=16)
    rollouts = engine.generate(prompts(model, 16), sampling=Sampling(max_tokens=2048, stop=()))
    gaps = torch.stack(
        [(ours.cpu() - each.logprobs).abs() for ours, each in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)]
    )
    parts = {f"{start}-{start + 512}": gaps[:, start : start + 512].flatten() for start in range(0, 2048, 512)}
    found = {
        span: {
            "mean": float(part.mean()),
            "p50": float(part.quantile(0.5)),
            "p99": float(part.quantile(0.99)),
            "max": float(part.max()),
        }
        for span, part in parts.items()
    }
    print("noise", json.dumps(found), flush=True)
    return found


def parting(model, tokens: int = 256) -> dict[str, float]:
    """Share of 64 rollouts that differ at some token when they run in 16, 32 slots instead of 64."""
    kv = KV(policy="rkv", budget=64, interval=16, protect_prompt=False)
    problem = [prompts(model, 1, 40)[0]]
    runs = {
        slots: [r.response for r in Engine(model, kv, slots=slots).generate(problem, 64, Sampling(max_tokens=tokens, stop=()))]
        for slots in (64, 32, 16)
    }
    again = [r.response for r in Engine(model, kv, slots=64).generate(problem, 64, Sampling(max_tokens=tokens, stop=()))]
    found = {"64 again": sum(a != b for a, b in zip(runs[64], again, strict=True)) / 64}
    found |= {str(slots): sum(a != b for a, b in zip(runs[64], runs[slots], strict=True)) / 64 for slots in (32, 16)}
    print("parting", found, flush=True)
    return found


@torch.no_grad()
def float32_gap() -> dict[str, float]:
    """Largest |sampler - replay| in float32 with TF32 off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load_model("tiny", dtype="float32", device="cuda")
    kv = KV(policy="rkv", budget=64, interval=16, protect_prompt=False)
    rollouts = Engine(model, kv, slots=32).generate(prompts(model, 4, 40), 8, Sampling(max_tokens=1024, stop=()))
    gaps = [
        (ours.cpu() - each.logprobs).abs().max()
        for ours, each in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)
    ]
    found = {"tiny": float(torch.stack(gaps).max())}
    print("float32", found, flush=True)
    return found


def plot(result: dict, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sparse-rl"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    rows = result["sweep"]
    sparse = {row["slots"]: row for row in rows}
    slots = sorted(sparse)
    left.plot(slots, [sparse[each]["sparse_tokens_per_s"] for each in slots], "o-", label="sparse, any length")
    roofline = [sparse[each]["sparse_tokens_per_s"] / sparse[each]["roofline_share"] for each in slots]
    left.plot(slots, roofline, "k:", label="roofline, sparse")
    for longest in sorted({row["max_tokens"] for row in rows}):
        chosen = [row for row in rows if row["max_tokens"] == longest]
        dense = [row["dense_tokens_per_s"] for row in chosen]
        left.plot([row["slots"] for row in chosen], dense, ".-", label=f"dense, up to {longest // 1024}k tokens")
    left.set(
        xscale="log", yscale="log", xlabel="slots of the sparse cache; dense in the same memory", ylabel="decode tokens/s"
    )
    left.set_xticks(slots, slots)
    left.legend(fontsize="small")
    for each in slots:
        chosen = [row for row in rows if row["slots"] == each]
        ratios = [row["sparse_tokens_per_s"] / row["dense_tokens_per_s"] for row in chosen]
        right.plot([row["max_tokens"] for row in chosen], ratios, "o-", label=f"{each} slots")
    right.axhline(1, color="k", lw=0.5)
    right.set(xscale="log", yscale="log", xlabel="longest response, tokens", ylabel="sparse over dense, same KV memory")
    right.set_xticks(LENGTHS, [f"{each // 1024}k" for each in LENGTHS])
    right.legend(fontsize="small")
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
