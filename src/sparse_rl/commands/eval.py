"""`sparse-rl eval`: evaluate a model on benchmarks with several KV caches."""

import argparse
import os
from pathlib import Path

from ..config import KV, TASKS, DataConfig, RewardConfig, add_flags, flag_values, from_flags
from .arguments import add_model_flags, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser, lower="--slots or --max-tokens")
    parser.description = (
        "Sample benchmarks with the same seeds under several caches and compare: scores with 95 % intervals, lengths, memory. "
        "Finished samples stay in --out: run the same command again to continue."
    )
    parser.add_argument("model", metavar="MODEL", help="a hub id, a folder, a GGUF file, smollm2-135m or tiny")
    parser.add_argument(
        "--benchmarks",
        required=True,
        metavar="NAMES",
        help=f"tasks ({', '.join(name for name, task in TASKS.items() if task.test)}) or files of your own, with commas",
    )
    parser.add_argument(
        "--compare",
        metavar="CACHES",
        help="full or POLICY@BUDGET[+INTERVAL], with commas, as in full,rkv@512,snapkv@512+64; the interval is a quarter of the "
        "budget, differences are against the first [full, and what the model was trained under]",
    )
    parser.add_argument(
        "--samples-per-prompt", type=count, metavar="N", help="rollouts per problem [the task's: 1, contests 32]"
    )
    parser.add_argument("--pass-at", metavar="KS", help="pass@k for these k, such as 1,8,32 [powers of two up to the samples]")
    parser.add_argument(
        "--mismatch", action="store_true", help="replay every rollout and measure the mismatch of sampler and model"
    )
    parser.add_argument("--problems", type=count, metavar="N", help="only the first N of each benchmark [all]")
    parser.add_argument(
        "--max-tokens", type=count, metavar="N", help="maximum response tokens [the task's: 8192, contests 16384]"
    )
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="divides the logits; 0 is greedy [0.8]")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="sample from the smallest set of tokens with this probability [0.95]",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="base seed, the same for every cache [0]")
    parser.add_argument("--slots", type=count, metavar="N", help="rollouts at a time [what memory allows; 64 on a CPU]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of samples and results [runs/eval/MODEL-…]")
    parser.add_argument("--overwrite", action="store_true", help="delete the evaluation in --out first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--rows", action="store_true", help="also print rows for a LaTeX table")
    add_model_flags(parser)
    add_flags(parser, KV)
    add_flags(parser, DataConfig, without=("train", "test", "max_prompt_tokens"))
    add_flags(parser, RewardConfig)


def run(args: argparse.Namespace) -> None:
    from ..evaluate.compare import settings
    from ..models.stored_kv import stored_kv

    flags = flag_values(args, KV)
    caches = settings(args.compare, flags, {} if args.compare else stored_kv(args.model, flags.get("policy")))
    workers = min(8, max(2, (os.cpu_count() or 2) // 2))  # more workers: the GPU idles while a chunk is graded
    data, reward = from_flags(args, DataConfig), from_flags(args, RewardConfig, {"workers": workers})
    from ..evaluate.evaluation import evaluate

    evaluate(args, caches, data, reward)
