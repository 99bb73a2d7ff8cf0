"""How much of a batch does each correction leave to learn from, before any training? From the log ξ that evaluations wrote down:

    AS_TRAINED="--mismatch --temperature 1 --top-p 1 --kv.protect-prompt false"
    sparse-rl eval tiny --benchmarks arithmetic --problems 96 --compare rkv@32+8 $AS_TRAINED --out out/small
    sparse-rl eval MODEL --benchmarks gsm8k --problems 48 --compare rkv@160 $AS_TRAINED --max-tokens 768 --dtype float32 --out out/real
    python experiments/weights.py tiny=out/small Qwen2.5-Coder-0.5B-Instruct=out/real --json benchmarks/results/weights.json
    python experiments/weights.py --table benchmarks/results/weights.json

`sparse/effective` of every preset, and how the products over sequences that `sequence_mask` weighs by are spread.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from sparse_rl.bench.record import environment
from sparse_rl.config import PRESETS
from sparse_rl.learner.batch import padded
from sparse_rl.learner.correction import correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", metavar="MODEL=OUT", help="folders of sparse-rl eval --mismatch with one cache each"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print this JSON as Markdown and do nothing else")
    args = parser.parse_args()
    if args.table:
        found = json.loads(args.table.read_text())
    else:
        results = [{"model": model, **left(Path(out))} for model, out in (each.split("=", 1) for each in args.folders)]
        found = environment("weights", torch.device("cpu")) | {"results": results}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def left(folder: Path) -> dict:
    """Of the rollouts in a folder: what each preset rejects and leaves, and the products' spread."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    lengths = [json.loads(line)["tokens"] for line in lines]
    chunks = [json.loads(line)["log_xi"] for line in (folder / "chunks.jsonl").read_text().splitlines()]
    log_xi = torch.from_numpy(np.concatenate([np.load(folder / file) for file in chunks])).split(lengths)
    mask = padded([torch.ones(length) for length in lengths])
    sums = torch.stack([each.sum() for each in log_xi])
    asked = json.loads((folder / "asked.json").read_text())
    presets = {preset: correct(padded(list(log_xi)), mask, preset).metrics for preset in PRESETS}
    return {
        "setting": json.loads(lines[0])["setting"],
        "asked": {key: asked[key] for key in ("dtype", "temperature", "top_p", "seed", "settings", "benchmarks")},
        "rollouts": len(lengths),
        "mean_tokens": sum(lengths) / len(lengths),
        "log_product": {"mean": sums.mean().item(), "median": sums.median().item()},
        "product_below_0.01": (sums < np.log(0.01)).float().mean().item(),
        "product_0.5_to_3": ((sums >= np.log(0.5)) & (sums <= np.log(3))).float().mean().item(),
        "presets": {
            preset: {key: metrics[f"sparse/{key}"] for key in ("rejection_rate", "wasted_tokens", "effective")}
            for preset, metrics in presets.items()
        },
    }


def table(found: dict) -> str:
    results = found["results"]
    cells = [f"{row['model']}, {row['setting']}: rejected | worth" for row in results]
    lines = ["| preset | " + " | ".join(cells) + " |", "|---|" + "---:|---:|" * len(results)]
    for preset in results[0]["presets"]:
        values = [row["presets"][preset] for row in results]
        cells = [f"{each['rejection_rate']:.0%} | {each['effective']:.0%}" for each in values]
        lines.append(f"| `{preset}` | " + " | ".join(cells) + " |")
    for row in results:
        product = f"median log {row['log_product']['median']:.1f}, mean {row['log_product']['mean']:.1f}"
        spread = f"{row['product_below_0.01']:.0%} below 0.01, {row['product_0.5_to_3']:.0%} from 0.5 to 3"
        lines.append(
            f"\n{row['model']}: {row['rollouts']} rollouts of {row['mean_tokens']:.0f} tokens; products {product}; {spread}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
