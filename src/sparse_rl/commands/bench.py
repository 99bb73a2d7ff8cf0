"""`sparse-rl bench`: benchmark rollouts, the learner, memory and whole training steps on this machine."""

import argparse
from pathlib import Path

from ..config import KV, Config, add_flags, from_flags
from .arguments import LOWER, add_model_flags, recipe_or_model, refuse_rank_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..models.shapes import SHAPES

    benches = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    rollout = benches.add_parser("rollout", help="transformers generate, our dense and our sparse engine", allow_abbrev=False)
    rollout.set_defaults(command=run_rollout, parser=rollout, lower="--batch, --kv.budget or --max-tokens")
    rollout.description = "Sample the same work three ways in one process and print tokens/s, KV bytes and ratios."
    rollout.add_argument(
        "--model", default="135M", help=f"random weights of a shape ({', '.join(SHAPES)}), a hub id, a folder or tiny [135M]"
    )
    rollout.add_argument("--batch", type=int, default=16, help="slots, and sequences of generate [16]")
    rollout.add_argument("--prompt-tokens", type=int, default=32, help="random tokens of each prompt [32]")
    rollout.add_argument("--max-tokens", type=int, default=1024, help="response tokens of each sequence, at most [1024]")
    rollout.add_argument(
        "--lengths",
        choices=["full", "uniform"],
        default="full",
        help="response lengths: all of max-tokens, or uniform from a sixteenth of it to all of it [full]",
    )
    rollout.add_argument("--waves", type=float, default=1.0, help="rollouts for each slot [1]")
    rollout.add_argument(
        "--same-memory",
        action="store_true",
        help="give the dense engine only as many slots as a paged cache with shared prompts runs in the sparse cache's memory",
    )
    rollout.add_argument(
        "--generate-tokens",
        type=int,
        default=10**9,
        metavar="N",
        help="end transformers generate after this many [max-tokens]",
    )
    rollout.add_argument(
        "--arms",
        nargs="+",
        choices=["generate", "dense", "sparse"],
        default=["generate", "dense", "sparse"],
        help="what to run; ratios are to the first [all]",
    )
    rollout.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and sampling [0]")
    rollout.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results, with machine and versions, to a file"
    )
    add_model_flags(rollout)
    add_flags(rollout, KV)
    _add_bench_learner(benches.add_parser("learner", help="an update against the GPU's peak", allow_abbrev=False))
    memory = benches.add_parser("memory", help="what plan predicts against what a GPU measures, by phase", allow_abbrev=False)
    memory.set_defaults(command=run_memory, parser=memory)
    memory.description = "Run the phases of a step apart on random weights, and print their peaks beside the plan's."
    _add_bench_run(memory)
    step = benches.add_parser("step", help="whole training steps by phase, sparse and dense", allow_abbrev=False)
    step.set_defaults(command=run_step, parser=step)
    step.description = (
        "Train on random weights and made-up prompts and print what each phase of the last step took: 1 step of 256 rollouts "
        "unless --steps and the others say otherwise, sparse_rl and dense unless --method names one."
    )
    step.add_argument(
        "--lengths",
        choices=["uniform", "full"],
        default="uniform",
        help="response lengths: uniform from a sixteenth of max_tokens to all of it, or all of full length [uniform]",
    )
    _add_bench_run(step)


def _add_bench_learner(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run_learner, parser=parser, lower="--tokens-per-microbatch or --tokens")
    parser.description = (
        "Learn from made-up rollouts: the update, the pass before it and the shadow pass, as tokens/s and MFU."
    )
    parser.add_argument("--model", default="1.5B", help="a shape, a hub id, a folder or tiny [1.5B]")
    parser.add_argument("--tokens", type=int, default=4096, help="response tokens of each rollout [4096]")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="random tokens of each prompt [256]")
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384, help="tokens per pass, prompts included [16384]")
    parser.add_argument("--microbatches", type=int, default=2, help="micro-batches per update [2]")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again in backward")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and rollouts [0]")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results, with machine and versions, to a file"
    )
    add_model_flags(parser)


def _add_bench_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODEL_OR_RECIPE", help="a shape (0.5B, 1.5B, 3B, 7B), a folder, tiny, or a recipe")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="random tokens of each prompt [256]")
    parser.add_argument("--memory-cap", metavar="SIZE", help="limit the GPU memory of the process, such as 22GiB")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results, with machine and versions, to a file"
    )
    parser.set_defaults(lower=LOWER)
    add_flags(parser, Config)


def run_rollout(args: argparse.Namespace) -> None:
    kv = from_flags(args, KV)
    from ..bench.rollout import bench

    bench(args, kv)


def run_learner(args: argparse.Namespace) -> None:
    from ..bench.learner import bench

    bench(args)


def run_memory(args: argparse.Namespace) -> None:
    from ..bench.synthetic import synthetic_config

    refuse_rank_count(args)
    config = from_flags(args, Config, synthetic_config(recipe_or_model(args.what)))
    from ..bench.memory import bench

    bench(args, config)


def run_step(args: argparse.Namespace) -> None:
    from ..bench.synthetic import synthetic_config

    refuse_rank_count(args)
    config = from_flags(args, Config, synthetic_config(recipe_or_model(args.what)))
    from ..bench.step import bench

    bench(args, config)
