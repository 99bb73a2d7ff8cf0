"""How much of the mismatch of a mixture-of-experts model does routing replay remove? On random weights, in bfloat16 on a CPU:

    python experiments/routing.py --json benchmarks/results/routing.json
    python experiments/routing.py --table benchmarks/results/routing.json

Each rollout is sampled once, with its expert choices. The learner's log-probs are then computed with these choices and without,
under the dense view (xi = pi_dense / pi_sampler) and under the sampler's own view (engine noise).
"""

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, PreTrainedModel, Qwen3MoeConfig

from sparse_rl import KV, Engine, Sampling
from sparse_rl import replay as replay_rollouts
from sparse_rl.bench.record import environment
from sparse_rl.evaluate.mismatch import PRESET, k3
from sparse_rl.learner.batch import padded, response_mask
from sparse_rl.learner.correction import correct
from sparse_rl.learner.replay import forward
from sparse_rl.rollout.rollout import Rollout

SIZE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Qwen3-MoE": Qwen3MoeConfig(**SIZE, head_dim=16, num_experts=32, moe_intermediate_size=16, norm_topk_prob=True),
    "Mixtral": MixtralConfig(**SIZE, num_local_experts=32, sliding_window=None),
    "OLMoE": OlmoeConfig(**SIZE, num_experts=32),
}
CACHES = {"full": KV(policy="full"), "R-KV 32 + 8": KV(policy="rkv", budget=32, interval=8, protect_prompt=False)}
GAIN = 4
"""Factor of the fresh weights, whose attention and routers are nearly even."""
PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 2, 8, 24, 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print this JSON as Markdown and do nothing else")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    results = []
    for name in MODELS:
        model = random_model(name, getattr(torch, args.dtype))
        results += [{"model": name, "cache": cache, **measure(model, kv)} for cache, kv in CACHES.items()]
    found = environment("routing", torch.device("cpu")) | {"dtype": args.dtype, "results": results}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def random_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(GAIN if weight.dim() > 1 else 1)
    return model.to(dtype)


def measure(model: PreTrainedModel, kv: KV) -> dict:
    """Return the flip rate, and the mismatch with and without the sampler's experts."""
    draw = random.Random(0)
    prompts = [[draw.randrange(SIZE["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    engine = Engine(model, kv, slots=PROMPTS * SAMPLES)
    rollouts = engine.generate(prompts, SAMPLES, Sampling(max_tokens=TOKENS, stop=()), routing=True)
    flips = {}
    for view in ("dense", "sparse"):
        with torch.no_grad():
            flipped, choices = forward(model, rollouts, view).routing.flips_and_choices.tolist()
        flips[view] = flipped / choices
    free = [replace(rollout, routing=None) for rollout in rollouts]
    return {"flip_rate": flips, "replayed": mismatch(model, rollouts), "free": mismatch(model, free)}


@torch.no_grad()
def mismatch(model: PreTrainedModel, rollouts: list[Rollout]) -> dict[str, float]:
    dense, sparse = ([each.cpu() for each in replay_rollouts(model, rollouts, view)] for view in ("dense", "sparse"))
    log_xi = [ours - rollout.logprobs for ours, rollout in zip(dense, rollouts, strict=True)]
    noise = torch.cat([ours - rollout.logprobs for ours, rollout in zip(sparse, rollouts, strict=True)]).abs()
    rejected_B = correct(padded(log_xi), response_mask(rollouts), PRESET).rejected
    return {
        "k3": k3(torch.cat(log_xi)),
        "rejected": float(rejected_B.float().mean()),
        "smallest_log_xi": float(torch.cat(log_xi).min()),
        "noise_mean": float(noise.mean()),
        "noise_max": float(noise.max()),
    }


def table(found: dict) -> str:
    head = "| model | cache | flip rate | k3, own routing | k3, replayed | rejected, own | rejected, replayed |"
    head += " engine noise, own: mean, largest | engine noise, replayed: mean, largest |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for each in found["results"]:
        free, replayed = each["free"], each["replayed"]
        cells = [
            each["model"],
            each["cache"],
            f"{each['flip_rate']['dense']:.2%}",
            f"{free['k3']:.1e}",
            f"{replayed['k3']:.1e}",
        ]
        cells += [f"{one['rejected']:.0%}" for one in (free, replayed)]
        cells += [f"{one['noise_mean']:.4f}, {one['noise_max']:.3f}" for one in (free, replayed)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
