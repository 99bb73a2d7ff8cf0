"""How far sampler and replay are apart, by architecture and policy, on random weights in float32 on the CPU.

python benchmarks/exactness.py --out benchmarks/results/exactness.json
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
from conftest import ARCHITECTURES, random_model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for architecture in ARCHITECTURES:
        model = random_model(architecture)
        for policy in POLICIES:
            kv = KV(policy=policy, budget=32, interval=8, window=4, sinks=2, protect_prompt=False)
            rollouts = Engine(model, kv, slots=3).generate(
                [[7, 8, 9, 10, 11], list(range(3, 60))], 2, Sampling(max_tokens=130, stop=())
            )
            row = {"architecture": architecture, "policy": policy}
            for view in ("sparse", "dense"):
                gaps = [
                    (ours.detach() - r.logprobs).abs() for ours, r in zip(replay(model, rollouts, view), rollouts, strict=True)
                ]
                row[f"{view}_max"], row[f"{view}_mean"] = float(torch.cat(gaps).max()), float(torch.cat(gaps).mean())
            rows.append(row)
            print(row)
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
    print("largest sampler - replay:", max(row["sparse_max"] for row in rows))


if __name__ == "__main__":
    main()
