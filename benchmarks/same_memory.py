"""Long rollouts in the same KV memory: our sparse engine, our dense engine and vLLM, the same prompts and the same lengths.

python benchmarks/same_memory.py ours --sequences 256 --json benchmarks/results/same-memory-256.json
python benchmarks/same_memory.py dense --sequences 256 --json benchmarks/results/same-memory-256.json
python benchmarks/same_memory.py vllm --sequences 256 --json benchmarks/results/same-memory-256.json [--seconds 100]
python benchmarks/same_memory.py dense --kv-dtype 4bit …   (8bit or 4bit; vllm: fp8)
python benchmarks/same_memory.py ours --kv-dtype 8bit --budget 992 …   (as many bytes as 512 in bfloat16; 4bit: 1776)
python benchmarks/same_memory.py vllm --kv-gib 3.2 --lengths full …   (the memory that a training run leaves, without ours)

Prompts of 256 tokens in groups of 8; responses uniform from a sixteenth of the longest to all of it, or all of full length;
log-probs of sampled tokens are returned. Ours runs all sequences at once in slots of budget + interval tokens. In the model's dtype it sets the memory:
vLLM gets the bytes that it allocated for keys, values and side tables, pages them, shares prompts and preempts by its own rules; so
does our dense engine. In 8 or 4 bits, ours is another arm, and its budget must fit these bytes.
`--seconds` ends vLLM early and counts the tokens it has by then. That favours vLLM: sequences are still short, and the tail never
comes.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["ours", "dense", "vllm"])
    parser.add_argument("--model", default="1.5B", help="a shape of sparse_rl.models.shapes with random weights, or tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512, help="kv.budget of ours; its interval is a quarter of that")
    parser.add_argument(
        "--kv-dtype", default="auto", help="storage of keys and values, of ours and dense (8bit, 4bit) and vllm (fp8)"
    )
    parser.add_argument("--lengths", choices=["uniform", "full"], default="uniform")
    parser.add_argument("--kv-gib", type=float, help="memory of dense and vllm for keys and values [what ours took]")
    parser.add_argument("--seconds", type=float, help="end vLLM after this long")
    parser.add_argument(
        "--json", type=Path, required=True, help="ours writes it; vLLM reads the bytes there and adds its part"
    )
    args = parser.parse_args()
    args.name = args.engine if args.kv_dtype == "auto" else f"{args.engine} {args.kv_dtype}"
    rng, vocab = random.Random(0), 20 if args.model == "tiny" else 100_000
    prompts = [[rng.randrange(5, vocab) for _ in range(args.prompt_tokens)] for _ in range(-(-args.sequences // GROUP))]
    shortest = args.longest if args.lengths == "full" else args.longest // 16
    lengths = [rng.randint(shortest, args.longest) for _ in range(len(prompts) * GROUP)]
    args.sequences = len(lengths)
    if args.engine == "ours" and args.kv_gib is not None:
        raise SystemExit("--kv-gib has no effect on ours: its budget sets the memory.")
    runs = {"ours": ours, "dense": dense, "vllm": vllm}
    record = runs[args.engine](args, prompts, lengths)
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record[args.name]))


def ours(args: argparse.Namespace, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    from sparse_rl import KV, Engine, Sampling
    from sparse_rl.bench.rollout import warm_up

    model = model_of(args)
    kv = KV(policy="rkv", budget=args.budget, interval=args.budget // 4, protect_prompt=False, dtype=args.kv_dtype)
    engine = Engine(model, kv, slots=len(lengths))
    kv_bytes, side_bytes = engine.cache.kv_bytes, engine.cache.side_bytes
    if kv.quantised:
        record = json.loads(args.json.read_text())
        room = record["kv_bytes"] + record["side_bytes"]
        if kv_bytes + side_bytes > room:
            raise SystemExit(
                f"--budget {args.budget} takes {kv_bytes + side_bytes:,} bytes, more than the {room:,} of ours: lower it."
            )
    else:
        record = work(args, kv_bytes) | {"kv": kv.model_dump(), "side_bytes": side_bytes}
    warm_up(engine, (prompts * GROUP)[: engine.slots], kv.capacity, uniform=True)
    started = now(args)
    rollouts = engine.generate(prompts, GROUP, Sampling(max_tokens=args.longest, stop=()), limits=lengths)
    seconds = now(args) - started
    stats, tokens = engine.stats, sum(len(rollout.response) for rollout in rollouts)
    found = {
        "budget": args.budget,
        "bytes": stats.peak_kv_bytes + stats.side_bytes,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "idle_share": stats.idle_share,
        **{f"{part}_s": getattr(stats, f"{part}_s") for part in ("prefill", "decode", "compaction", "host")},
    }
    return record | {args.name: found}


def work(args: argparse.Namespace, kv_bytes: int) -> dict[str, Any]:
    """Return the first part of a record: the machine, the sequences and the memory."""
    import torch

    from sparse_rl.bench.record import environment

    return environment("same-memory", torch.device(args.device)) | {
        "model": args.model,
        "sequences": args.sequences,
        "longest": args.longest,
        "lengths": args.lengths,
        "prompt_tokens": args.prompt_tokens,
        "group": GROUP,
        "kv_bytes": kv_bytes,
        "side_bytes": 0,
    }


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record to which an arm is added: the one of ours, or one with the memory of --kv-gib."""
    if not args.json.exists():
        if args.kv_gib is None:
            raise SystemExit(f"{args.json} does not exist. Run ours first, or pass --kv-gib.")
        return work(args, int(args.kv_gib * 2**30))
    record = json.loads(args.json.read_text())
    asked = {
        "sequences": args.sequences,
        "longest": args.longest,
        "prompt_tokens": args.prompt_tokens,
        "lengths": args.lengths,
    }
    if args.kv_gib is not None:
        asked["kv_bytes"] = int(args.kv_gib * 2**30)
    if other := [key for key, value in asked.items() if record.get(key, "uniform") != value]:
        raise SystemExit(f"{args.json} has another {', '.join(other)}: pass another --json.")
    return record


def dense(args: argparse.Namespace, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Our dense engine in the bytes of the sparse cache and its side tables, or in --kv-gib. Sequences take pages as they grow."""
    from sparse_rl import KV, Engine, Sampling
    from sparse_rl.bench.lengths import live_tokens
    from sparse_rl.bench.rollout import DENSE_SLOTS, warm_up
    from sparse_rl.sizes import token_bytes

    record = begun(args)
    kv_bytes = record["kv_bytes"] + record["side_bytes"]
    model = model_of(args)
    kv = KV(policy="full", dtype=args.kv_dtype)
    probe = Engine(model, kv, slots=1)
    tokens = kv_bytes / token_bytes(probe.limits.shape, model.dtype.itemsize, kv.dtype)
    slots = min(len(lengths), int(DENSE_SLOTS * tokens / live_tokens(lengths, args.prompt_tokens)))
    del probe
    engine = Engine(model, kv, slots=slots)
    engine.reserve_dense(args.prompt_tokens, args.longest, len(prompts), GROUP, kv_bytes=kv_bytes)
    warm_up(engine, (prompts * GROUP)[: engine.slots], 256, uniform=True)
    started = now(args)
    rollouts = engine.generate(prompts, GROUP, Sampling(max_tokens=args.longest, stop=()), limits=lengths)
    seconds = now(args) - started
    stats, sampled = engine.stats, sum(len(rollout.response) for rollout in rollouts)
    found = {"slots": slots, "tokens": sampled, "seconds": seconds, "tokens_per_s": sampled / seconds}
    for name in ("peak_kv_bytes", "preemptions", "recomputed_tokens", "page_waste", "idle_share", "prefill_s", "decode_s"):
        found[name] = getattr(stats, name)
    return record | {args.name: found}


def vllm(args: argparse.Namespace, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    record = begun(args)
    llm = LLM(
        model=config_folder(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=args.longest + args.prompt_tokens + 8,
        max_num_seqs=len(lengths),
        kv_cache_dtype=args.kv_dtype,
        kv_cache_memory_bytes=record["kv_bytes"] + record["side_bytes"],
        seed=0,
        disable_log_stats=True,
    )
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    warm = SamplingParams(max_tokens=32, **options)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:16]], warm, use_tqdm=False)
    llm.reset_prefix_cache()
    engine = llm.llm_engine
    started = time.perf_counter()
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length, output_kind=RequestOutputKind.FINAL_ONLY, **options)
        engine.add_request(str(number), {"prompt_token_ids": prompts[number // GROUP]}, params)
    finished, marks, elapsed = 0, {}, 0.0
    while engine.has_unfinished_requests() and (args.seconds is None or elapsed < args.seconds):
        finished += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        elapsed = time.perf_counter() - started
        if int(elapsed) // 10 > len(marks):
            marks[round(elapsed, 1)] = finished + running_tokens(engine)
    tokens = finished + running_tokens(engine)
    whole = not engine.has_unfinished_requests()
    record[args.name] = {
        "version": vllm.__version__,
        "tokens": tokens,
        "seconds": elapsed,
        "tokens_per_s": tokens / elapsed,
        "whole": whole,
        "tokens_by_second": marks,
    }
    return record


def model_of(args: argparse.Namespace) -> Any:
    import torch

    from sparse_rl import load_model
    from sparse_rl.models.shapes import random_model

    if args.model == "tiny":
        return load_model("tiny", dtype="float32", device=args.device)
    return random_model(args.model, dtype=torch.bfloat16, device=args.device, seed=0)


def now(args: argparse.Namespace) -> float:
    """Return the time after all launched work."""
    import torch

    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def running_tokens(engine) -> int:
    """Tokens that sequences have which did not end yet; a preempted sequence keeps its tokens."""
    return sum(state.detokenizer.num_output_tokens() for state in engine.output_processor.request_states.values())


def config_folder(shape: str) -> str:
    from sparse_rl.models.shapes import SHAPES

    fields = {key: value for key, value in SHAPES[shape].items() if key != "architecture"}
    fields |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16", "rope_theta": 1e6}
    fields |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


if __name__ == "__main__":
    main()
