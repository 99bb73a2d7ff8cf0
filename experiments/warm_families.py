"""Does a short run raise the score of a Qwen3.5-like and of a gpt-oss-like model? On a CPU, from a warm start:

    python experiments/warm_families.py --out benchmarks/results/warm-families.json

Both models have four layers and the embedded tokenizer. They start from the weights of the embedded model, as far as the
families share them, and learn the rest from worked solutions of the embedded task; the first model also learns the embedded
model's hidden states. Gated DeltaNet layers, the norms of queries and keys and the gates of attention are new in the first
model; windows, learned sinks and routed experts in the second. Worked solutions are wrong now and then on purpose, as for the
embedded model: training removes these mistakes.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen3_5TextConfig

import sparse_rl
from sparse_rl import load_model, load_tokenizer
from sparse_rl.bench.record import environment
from sparse_rl.models.make_tiny import IGNORED, collate, training_problems

TINY, TOKENIZER = load_model("tiny", dtype="float32", device="cpu"), load_tokenizer("tiny")
SHAPE: dict[str, Any] = {
    name: getattr(TINY.config, name)
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rms_norm_eps",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
} | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
FAMILIES = {
    "Qwen3.5": Qwen3_5TextConfig(
        **SHAPE,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        attention_bias=True,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "gpt-oss": GptOssConfig(
        **SHAPE,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
WARM_STEPS = {"Qwen3.5": 140, "gpt-oss": 40}
WARM_LR = {"Qwen3.5": 1e-3, "gpt-oss": 2e-4}
WARM_BATCH = 8
RUN: dict[str, Any] = {
    "extends": "quickstart",
    "kv": {"policy": "rkv", "budget": 54, "interval": 13, "protect_prompt": False},
    "steps": 30,
    "eval": {"problems": 240, "slots": 240, "cache": "dense"},
}


@torch.no_grad()
def qwen_like() -> PreTrainedModel:
    """Return the embedded model with gated and normed attention in two layers, and new DeltaNet layers in the others."""
    model = AutoModelForCausalLM.from_config(FAMILIES["Qwen3.5"], dtype=torch.float32)
    copy_shared(model)
    model.model.norm.weight.sub_(1)  # norms of this family scale by 1 + weight
    heads, dim = SHAPE["num_attention_heads"], SHAPE["head_dim"]
    for layer, source in zip(model.model.layers, TINY.model.layers, strict=True):
        layer.mlp.load_state_dict(source.mlp.state_dict())
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.sub_(1)
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.out_proj.weight.mul_(0.1)
            continue
        ours, theirs = layer.self_attn, source.self_attn
        for mine, other in ((ours.q_proj.weight, theirs.q_proj.weight), (ours.q_proj.bias, theirs.q_proj.bias)):
            mine.zero_().view(heads, 2, dim, -1)[:, 0] = other.view(heads, dim, -1)  # the second half is the gate
        ours.k_proj.load_state_dict(theirs.k_proj.state_dict())
        ours.v_proj.load_state_dict(theirs.v_proj.state_dict())
        ours.o_proj.weight.copy_(2 * theirs.o_proj.weight)  # gates start at sigmoid(0) = 1/2
        ours.o_proj.bias.zero_()
        ours.q_norm.weight.fill_(0.2)
        ours.k_norm.weight.fill_(0.2)
    return model


@torch.no_grad()
def gpt_oss_like() -> PreTrainedModel:
    """Return the embedded model with windows and sinks, and with each MLP copied to four experts that differ by noise.

    An expert computes (up + 1) gate sigmoid(1.702 gate): the MLP's up silu(gate) / 1.702, if gate is divided by 1.702 and the
    bias of up is -1.
    """
    model = AutoModelForCausalLM.from_config(FAMILIES["gpt-oss"], dtype=torch.float32)
    copy_shared(model)
    for layer, source in zip(model.model.layers, TINY.model.layers, strict=True):
        layer.self_attn.load_state_dict(source.self_attn.state_dict(), strict=False)
        layer.self_attn.o_proj.bias.zero_()
        layer.self_attn.sinks.normal_()
        layer.mlp.router.weight.normal_(std=0.1)
        layer.mlp.router.bias.zero_()
        experts, mlp = layer.mlp.experts, source.mlp
        experts.gate_up_proj[..., ::2] = mlp.gate_proj.weight.T / experts.alpha
        experts.gate_up_proj[..., 1::2] = mlp.up_proj.weight.T
        experts.gate_up_proj_bias[..., ::2] = 0
        experts.gate_up_proj_bias[..., 1::2] = -1
        experts.down_proj[:] = mlp.down_proj.weight.T * experts.alpha
        experts.down_proj_bias.zero_()
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    return model


def copy_shared(model: PreTrainedModel) -> None:
    """Copy the embeddings and the norms of the embedded model."""
    own = TINY.state_dict()
    model.load_state_dict({name: weight for name, weight in own.items() if "embed" in name or "norm" in name}, strict=False)


def warm_up(model: PreTrainedModel, name: str, seed: int) -> None:
    """Train on worked solutions. The hybrid model also learns the hidden states of the embedded model, layer by layer."""
    steps, problems = WARM_STEPS[name], training_problems(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR[name], betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
    )
    for step in range(steps):
        input_ids, labels = collate([next(problems) for _ in range(WARM_BATCH)], TOKENIZER)
        output = model(input_ids=input_ids, labels=labels, output_hidden_states=True)
        loss = output.loss
        if name == "Qwen3.5":
            with torch.no_grad():
                targets = TINY(input_ids=input_ids, output_hidden_states=True).hidden_states
            graded = labels != IGNORED
            pairs = [(ours[graded], theirs[graded]) for ours, theirs in zip(output.hidden_states, targets, strict=True)][1:]
            loss = loss + sum((ours - theirs).square().mean() / theirs.var() for ours, theirs in pairs) / len(pairs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 20 == 0:
            print(f"{name}: step {step + 1}/{steps}, loss {float(loss.detach()):.3f}", flush=True)


def train(path: str, folder: Path, method: str, seed: int) -> dict[str, Any]:
    """Train a run and return its scores before and after, with their 95 % intervals, and the metrics of its steps."""
    run = sparse_rl.train(RUN | {"method": method, "seed": seed, "model": {"path": path}, "run_dir": str(folder / method)})
    first, *steps = run.metrics
    key = "eval/arithmetic/pass@1"

    def score(row: dict[str, float]) -> dict[str, float]:
        return {"pass@1": row[key], "low": row[f"{key}_low"], "high": row[f"{key}_high"]}

    names = ("reward/mean", "sparse/mismatch_k3", "sparse/rejection_rate", "sparse/engine_noise", "kv/token_savings")
    return {
        "before": score(first),
        "after": score(steps[-1]),
        **{name: [row[name] for row in steps] for name in names},
        "compactions": [row["kv/evictions"] for row in steps],
    }


def measure(name: str, methods: list[str], seed: int) -> dict[str, Any]:
    """Build a model, warm it up and train it with each method."""
    started_s = time.process_time()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = {"Qwen3.5": qwen_like, "gpt-oss": gpt_oss_like}[name]()
    warm_up(model, name, seed)
    row: dict[str, Any] = {
        "layers": FAMILIES[name].layer_types,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "warm_steps": WARM_STEPS[name],
        "warm_cpu_s": round(time.process_time() - started_s),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "warm")
        for part in (model, TOKENIZER):
            part.save_pretrained(path)
        for method in methods:
            row[method] = train(path, Path(folder), method, seed)
    return row | {"cpu_s": round(time.process_time() - started_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["sparse_rl"], help="methods to train each warm model with")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = environment("warm-families", torch.device("cpu")) | {"seed": args.seed, "run": RUN, "models": {}}
    with ProcessPoolExecutor(len(FAMILIES), multiprocessing.get_context("spawn")) as processes:  # one core each
        jobs = {name: processes.submit(measure, name, args.methods, args.seed) for name in FAMILIES}
        for name, job in jobs.items():
            record["models"][name] = job.result()
            args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
