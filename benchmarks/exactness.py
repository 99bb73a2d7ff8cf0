"""How far sampler and replay are apart, by architecture, policy and kv.dtype, on random weights in float32 on the CPU.

python benchmarks/exactness.py --out benchmarks/results/exactness.json

With 8 and 4 bits, rounding may flip a code, and later tokens then differ more. `first_flips` is the share of codes and steps that
flip, up to the first flipped token of each sequence; `flips` is the share of all tokens. `sparse_max` is the largest distance at
tokens that no flip has reached, `after_max` at the others.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch
import transformers

from sparse_rl import KV, Engine, Sampling, replay
from sparse_rl.kv.policies import POLICIES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flips import sampled_and_replayed
from random_models import ARCHITECTURES, random_model

LONG = list(range(3, 60))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for architecture in ARCHITECTURES:
        model = random_model(architecture)
        for policy in POLICIES:
            for dtype in ("auto", "8bit", "4bit"):
                kv = KV(policy=policy, budget=32, interval=8, window=4, sinks=2, protect_prompt=False, dtype=dtype)
                found = exact(model, kv) if dtype == "auto" else up_to_flips(model, kv)
                rows.append({"architecture": architecture, "policy": policy, "dtype": dtype} | found)
                print(rows[-1], flush=True)
    record = {
        "experiment": "exactness",
        "date": datetime.date.today().isoformat(),
        "device": "cpu",
        "dtype": "float32",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "kv": {"budget": 32, "interval": 8, "window": 4, "sinks": 2},
        "rows": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for dtype, name in (("auto", "sparse_max"), ("8bit", "sparse_max"), ("4bit", "sparse_max"), ("8bit", "after_max"),
                        ("4bit", "after_max"), ("8bit", "first_flips"), ("4bit", "first_flips")):  # fmt: skip
        print(f"largest {name}, {dtype}:", max(row[name] for row in rows if row["dtype"] == dtype))


def exact(model, kv):
    prompts = [[7, 8, 9, 10, 11], LONG]
    rollouts = Engine(model, kv, slots=3).generate(prompts, 2, Sampling(max_tokens=130, stop=()))
    row = {}
    for view in ("sparse", "dense"):
        gaps = [(ours.detach() - r.logprobs).abs() for ours, r in zip(replay(model, rollouts, view), rollouts, strict=True)]
        row[f"{view}_max"], row[f"{view}_mean"] = float(torch.cat(gaps).max()), float(torch.cat(gaps).mean())
    return row


def up_to_flips(model, kv):
    prompts = [LONG[n:] + LONG[:n] for n in range(8)]
    found = sampled_and_replayed(Engine(model, kv, slots=len(prompts)), prompts, 130)
    after = found.gaps_Rt[~found.exact_Rt]
    return {
        "tokens": found.gaps_Rt.numel(),
        "exact_tokens": int(found.exact_Rt.sum()),
        "sparse_max": found.exact_max,
        "after_max": float(after.max()) if len(after) else 0.0,
        "first_flips": found.first_flips,
        "flips": float(found.differs_RTN.float().mean()),
        "dense_max": float(found.dense_gaps_Rt.max()),
        "dense_mean": float(found.dense_gaps_Rt.mean()),
    }


if __name__ == "__main__":
    main()
