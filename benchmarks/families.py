"""Decode speed of models with other layers, at shapes of about 1.5 billion parameters and with random weights:

    python benchmarks/families.py --json benchmarks/results/families.json [--families hybrid] [--tokens 2048] [--small]

`attention` is Qwen2.5-1.5B: every layer attends to all tokens. `window` has the same shape as a Gemma 3 of its depth: five of six
layers attend to the last 1,024 tokens. `hybrid` is a Qwen3.5: three of four layers are Gated DeltaNets. Each runs with a dense cache
and with R-KV 512 + 128 (full-attention layers only). `--small` tries the script on a CPU.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen2Config, Qwen3_5TextConfig

from sparse_rl import KV, Engine, Sampling
from sparse_rl.bench.record import environment
from sparse_rl.models.load import DTYPES, place

SIZE = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SMALL = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 8960}
SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
STATES = {"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SMALL_STATES = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


def configs(small: bool) -> dict[str, Any]:
    size, heads, states = (SMALL, SMALL_HEADS, SMALL_STATES) if small else (SIZE, HEADS, STATES)
    return {
        "attention": Qwen2Config(**size, **heads),
        "window": Gemma3TextConfig(
            **size, **heads, sliding_window=64 if small else 1024, query_pre_attn_scalar=heads["head_dim"]
        ),
        "hybrid": Qwen3_5TextConfig(**size, **heads, **states),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="attention,window,hybrid", help="comma-separated [attention,window,hybrid]")
    parser.add_argument("--slots", type=int, default=256, help="sequences at once [256]")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of every response [2048]")
    parser.add_argument("--small", action="store_true", help="shapes of a few thousand weights, 8 slots and 160 tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    slots, tokens, prompt = (8, 160, 32) if args.small else (args.slots, args.tokens, 256)
    budget, interval = (64, 16) if args.small else (512, 128)
    kvs = [KV(policy="full"), KV(policy="rkv", budget=budget, interval=interval, protect_prompt=False)]
    dtype, device = place(None, None)
    rows: list[dict[str, Any]] = []
    for family in args.families.split(","):
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(configs(args.small)[family], dtype=DTYPES[dtype]).eval()
        for kv in kvs:
            rows.append({"family": family} | measure(model, kv, slots, tokens, prompt))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                shapes = {"slots": slots, "tokens": tokens, "prompt_tokens": prompt}
                record = environment("families", model.device) | {"seed": 0, "dtype": dtype} | shapes | {"rows": rows}
                args.json.write_text(json.dumps(record, indent=1) + "\n")
        del model
        torch.cuda.empty_cache()


def measure(model: PreTrainedModel, kv: KV, slots: int, tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """Return the speed of a whole call. Groups of 8 share a prompt. A short call before it, with a compaction where there is one,
    compiles and captures graphs."""
    groups = slots // 8
    prompts = torch.randint(model.config.vocab_size, (groups, prompt_tokens), generator=torch.Generator().manual_seed(0))
    engine = Engine(model, kv, slots=slots)
    warm_up = 2 * kv.interval + (0 if kv.policy == "full" else kv.kept_tokens)
    engine.generate(prompts.tolist(), 8, Sampling(max_tokens=min(tokens, warm_up), stop=()))
    if model.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    rollouts = engine.generate(prompts.tolist(), 8, Sampling(max_tokens=tokens, stop=()))
    seconds = time.perf_counter() - began
    sampled = sum(len(rollout.response) for rollout in rollouts)
    return {
        "cache": kv.label,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tokens": sampled,
        "seconds": seconds,
        "tokens_per_s": sampled / seconds,
        "decode_s": engine.stats.decode_s,
        "kv_bytes": engine.stats.peak_kv_bytes,
    }


if __name__ == "__main__":
    main()
