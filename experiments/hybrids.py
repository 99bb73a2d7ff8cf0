"""How far do log-probs differ between cached and parallel passes of hybrid models? transformers' own, and sampler and replay:

    python experiments/hybrids.py --json benchmarks/results/hybrids.json

Random weights of the small models in docs/families.py, 2 samples of each of 2 prompts, 68 tokens each, R-KV 24 + 8, on a CPU. transformers is
compared over the same tokens: one token at a time with its cache, and in one pass.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from families import RUNS, build  # type: ignore[import-not-found]

from sparse_rl import KV, Engine, Sampling, replay
from sparse_rl.bench.record import environment
from sparse_rl.rollout.rollout import Rollout

MODELS = ["Qwen3.5", "Qwen3-Next", "OLMo-Hybrid", "LFM2", "Falcon-H1", "Nemotron-H", "Granite 4", "Bamba"]
PROMPTS, TOKENS = [[7, 8, 9], list(range(3, 60))], 68


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            rows.append({"model": name, "dtype": str(dtype).removeprefix("torch.")} | measure(name, dtype))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        record = environment("hybrids", torch.device("cpu")) | {"seed": 0, "tokens": TOKENS, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


@torch.no_grad()
def measure(name: str, dtype: torch.dtype) -> dict[str, Any]:
    plain, model = build(RUNS[name]).to(dtype), build(RUNS[name]).to(dtype)
    engine = Engine(model, KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=False), slots=3)
    rollouts = engine.generate(PROMPTS, 2, Sampling(max_tokens=TOKENS, stop=()))
    ours = [mine - rollout.logprobs for mine, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)]
    theirs = [cached(plain, rollout) - parallel(plain, rollout) for rollout in rollouts]
    return {"transformers": size_of(theirs), "sampler and replay": size_of(ours)}


def size_of(gaps: list[Tensor]) -> dict[str, float]:
    gaps_n = torch.cat(gaps).abs().float()
    return {"max": float(gaps_n.max()), "mean": float(gaps_n.mean())}


def parallel(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    logits = model(torch.tensor([rollout.prompt + rollout.response]), use_cache=False).logits[0, len(rollout.prompt) - 1 : -1]
    return chosen(logits, rollout)


def cached(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Feed the prompt, then one token at a time."""
    out = model(torch.tensor([rollout.prompt]), use_cache=True)
    logits = [out.logits[0, -1]]
    for token in rollout.response[:-1]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[0, -1])
    return chosen(torch.stack(logits), rollout)


def chosen(logits_TV: Tensor, rollout: Rollout) -> Tensor:
    return logits_TV.float().log_softmax(-1).gather(-1, torch.tensor(rollout.response)[:, None])[:, 0]


if __name__ == "__main__":
    main()
