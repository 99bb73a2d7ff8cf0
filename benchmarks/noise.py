"""Engine noise: the distance of the sampler's log-probs from replay's, by length, with logits in bfloat16 and in float32.

python benchmarks/noise.py --model 1.5B --json benchmarks/results/noise.json
python benchmarks/noise.py --model FOLDER --policies full rkv --kv-dtype auto 8bit 4bit --head-dtypes float32 --json OUT.json

Every policy and kv.dtype runs with the same weights and prompts. `mismatch` is the mean distance from the dense replay. Under `full` it is
that of quantisation alone, which the noise must stay far below; under other policies it includes evictions.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch

from sparse_rl import KV, Engine, Sampling, load_model, replay
from sparse_rl.bench.record import environment
from sparse_rl.models.load import DTYPES, place
from sparse_rl.models.shapes import SHAPES, random_model
from sparse_rl.models.support import set_head_dtype


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5B", help=f"a shape ({', '.join(SHAPES)}) with random weights, or a model")
    parser.add_argument("--name", help="name of the model in the JSON [the folder's]")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--head-dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--policies", nargs="+", default=["rkv"], help="policies, such as full rkv")
    parser.add_argument("--kv-dtype", nargs="+", default=["auto"], help="storage of keys and values: auto, 8bit, 4bit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype, device = place(args.dtype, None)
    if args.model in SHAPES:
        model = random_model(args.model, dtype=DTYPES[dtype], device=device, seed=0)
    else:
        model = load_model(args.model, dtype=dtype, device=device)
    rows: list[dict] = []
    for head, policy, stored in itertools.product(args.head_dtypes, args.policies, args.kv_dtype):
        kv = KV(policy=policy, budget=args.budget, interval=args.budget // 4, protect_prompt=False, dtype=stored)
        rows += noise(model, head, kv, args)
        if args.json:
            asked = {name: value for name, value in vars(args).items() if name not in ("json", "name")}
            asked["model"] = args.name or Path(args.model).name
            record = environment("noise", model.device) | {"seed": 0, "asked": asked, "rows": rows}
            args.json.write_text(json.dumps(record, indent=1) + "\n")


@torch.no_grad()
def noise(model, head_dtype: str, kv: KV, args: argparse.Namespace) -> list[dict]:
    """Return a row for each length: the noise over the first tokens of each rollout, up to that length."""
    set_head_dtype(model, head_dtype)
    vocab = model.config.get_text_config().vocab_size
    prompts = torch.randint(vocab, (args.rollouts, args.prompt_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine(model, kv, slots=args.rollouts)
    rollouts = engine.generate(prompts, sampling=Sampling(max_tokens=max(args.lengths), stop=()))
    gaps, dense_gaps = (gaps_of(model, rollouts, view, args.prompt_tokens + max(args.lengths)) for view in ("sparse", "dense"))
    rows = []
    for length in args.lengths:
        part = gaps[:, :length].flatten()
        p99 = part.sort().values[int(0.99 * (len(part) - 1))]  # torch's quantile takes at most 16 million values
        found = {"mean": part.mean(), "median": part.median(), "p99": p99, "max": part.max()}
        found["mismatch"] = dense_gaps[:, :length].mean()
        rows.append(
            {"head": head_dtype, "policy": kv.policy, "kv_dtype": kv.dtype, "tokens": length}
            | {name: float(value) for name, value in found.items()}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def gaps_of(model, rollouts, view, tokens_per_pass: int) -> torch.Tensor:
    """Return the distances [rollouts, tokens] of the sampler from a replay."""
    replayed = replay(model, rollouts, view, tokens_per_pass=tokens_per_pass)
    return torch.stack([(ours.cpu() - each.logprobs).abs() for ours, each in zip(replayed, rollouts, strict=True)])


if __name__ == "__main__":
    main()
