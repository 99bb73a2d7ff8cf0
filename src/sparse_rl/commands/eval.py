"""`sparse-rl eval`: evaluate a model on benchmarks with several KV caches."""

import argparse
import os
from pathlib import Path

from ..config import (
    KV,
    TASKS,
    AlertsConfig,
    CorrectionConfig,
    DataConfig,
    RewardConfig,
    add_flags,
    flag_values,
    from_flags,
)
from ..errors import UserError
from .arguments import add_json_flag, add_model_flags, count

NOT_MEASURED = {"weight", "cap", "normalize", "divisor", "opsm"}
"""Options of the correction that change no figure of --mismatch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser, lower="--slots or --max-tokens")
    parser.description = (
        "Evaluate a model on benchmarks with several KV caches and the same seeds. Print scores with 95 % intervals, "
        "response lengths and memory. Finished samples are stored in --out: run the same command again to continue."
    )
    parser.add_argument("model", metavar="MODEL", help="a hub id, a folder, a GGUF file, smollm2-135m or tiny")
    parser.add_argument(
        "--benchmarks",
        required=True,
        metavar="NAMES",
        help=f"tasks ({', '.join(name for name, task in TASKS.items() if task.test)}) or your own files, separated by commas",
    )
    parser.add_argument(
        "--compare",
        metavar="CACHES",
        help="caches to compare, separated by commas: full or POLICY@BUDGET[+INTERVAL], with :8bit or :4bit if quantised, such as "
        "full,rkv@512,snapkv@512+64. INTERVAL defaults to BUDGET/4. rkv@auto searches the smallest budget that meets "
        "the targets of training with kv.budget = auto (with --mismatch). Differences are relative to the first cache "
        "[full, and the cache the model was trained with]",
    )
    parser.add_argument(
        "--samples-per-prompt", type=count, metavar="N", help="rollouts per problem [task default: 1, contests 32]"
    )
    parser.add_argument("--pass-at", metavar="KS", help="pass@k for these k, such as 1,8,32 [powers of two up to the samples]")
    parser.add_argument(
        "--mismatch", action="store_true", help="replay every rollout and measure the mismatch between sampler and dense model"
    )
    parser.add_argument("--problems", type=count, metavar="N", help="use only the first N problems of each benchmark [all]")
    parser.add_argument(
        "--max-tokens", type=count, metavar="N", help="maximum response tokens [task default: 8192, contests 16384]"
    )
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="sampling temperature; 0 is greedy [0.8]")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="top-p: sample from the smallest set of tokens with this total probability [0.95]",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="base seed, shared by all caches [0]")
    parser.add_argument(
        "--slots", type=count, metavar="N", help="rollouts that run at once [as many as fit in memory; 64 on a CPU]"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for samples and results [runs/eval/MODEL-…]")
    parser.add_argument("--overwrite", action="store_true", help="delete the evaluation in --out first")
    add_json_flag(parser, "the results")
    parser.add_argument("--rows", action="store_true", help="also print rows for a LaTeX table")
    add_model_flags(parser)
    add_flags(parser, KV)
    add_flags(parser, CorrectionConfig, without=NOT_MEASURED)
    add_flags(parser, AlertsConfig, without=AlertsConfig.model_fields.keys() - {"xi_p05"})
    add_flags(parser, DataConfig, without=("train", "test", "max_prompt_tokens"))
    add_flags(parser, RewardConfig)


def run(args: argparse.Namespace) -> None:
    from ..evaluate.compare import settings
    from ..models.stored_kv import stored_kv

    judging = [
        f"{section.section}.{name}" for section in (CorrectionConfig, AlertsConfig) for name in flag_values(args, section)
    ]
    if judging and not args.mismatch:
        raise UserError(f"--{judging[0].replace('_', '-')} needs --mismatch, whose figures it judges: add --mismatch.")
    flags = flag_values(args, KV)
    caches = settings(args.compare, flags, {} if args.compare else stored_kv(args.model, flags))
    workers = min(8, max(2, (os.cpu_count() or 2) // 2))  # more workers: the GPU idles while a chunk is graded
    data, reward = from_flags(args, DataConfig), from_flags(args, RewardConfig, {"workers": workers})
    from ..evaluate.evaluation import evaluate
    from ..evaluate.mismatch import PRESET, Criteria

    criteria = Criteria(from_flags(args, CorrectionConfig).spec(PRESET), from_flags(args, AlertsConfig))
    evaluate(args, caches, data, reward, criteria)
