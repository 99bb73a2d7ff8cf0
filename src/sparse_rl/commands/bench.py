"""`sparse-rl bench`: benchmark rollouts, the learner, memory and whole training steps on this machine."""

import argparse

from ..config import KV, Config, add_flags, from_flags
from .arguments import LOWER, add_json_flag, add_model_flags, recipe_or_model, refuse_rank_count

RECORD = "the results, the machine and the versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..models.shapes import SHAPES

    benches = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    rollout = benches.add_parser(
        "rollout", help="compare transformers generate with the dense and the sparse engine", allow_abbrev=False
    )
    rollout.set_defaults(command=run_rollout, parser=rollout, lower="--batch, --kv.budget or --max-tokens")
    rollout.description = (
        "Sample the same prompts with transformers generate, the dense engine and the sparse engine in one process. Print "
        "tokens/s, KV bytes and ratios."
    )
    rollout.add_argument(
        "--model", default="135M", help=f"random weights of a shape ({', '.join(SHAPES)}), a hub id, a folder or tiny [135M]"
    )
    rollout.add_argument("--batch", type=int, default=16, help="number of slots, and batch size of transformers generate [16]")
    rollout.add_argument("--prompt-tokens", type=int, default=32, help="random tokens per prompt [32]")
    rollout.add_argument("--max-tokens", type=int, default=1024, help="maximum response tokens per sequence [1024]")
    rollout.add_argument(
        "--lengths",
        choices=["full", "uniform"],
        default="full",
        help="response lengths: all max-tokens (full), or uniform between max-tokens/16 and max-tokens [full]",
    )
    rollout.add_argument("--waves", type=float, default=1.0, help="rollouts per slot of the sparse engine [1]")
    rollout.add_argument(
        "--same-memory",
        action="store_true",
        help=(
            "run the dense engine in the sparse cache's memory: its sequences take pages as they grow, and the youngest wait "
            "if pages run out"
        ),
    )
    rollout.add_argument(
        "--generate-tokens",
        type=int,
        default=10**9,
        metavar="N",
        help="stop transformers generate after this many tokens [max-tokens]",
    )
    rollout.add_argument(
        "--arms",
        nargs="+",
        choices=["generate", "dense", "sparse"],
        default=["generate", "dense", "sparse"],
        help="engines to run; ratios are relative to the first [all]",
    )
    rollout.add_argument("--seed", type=int, default=0, help="seed for weights, prompts and sampling [0]")
    add_json_flag(rollout, RECORD)
    _add_head_dtype(rollout)
    add_model_flags(rollout)
    add_flags(rollout, KV)
    _add_bench_learner(benches.add_parser("learner", help="compare an update with the GPU's peak FLOP/s", allow_abbrev=False))
    memory = benches.add_parser("memory", help="compare predicted and measured memory peaks by phase", allow_abbrev=False)
    memory.set_defaults(command=run_memory, parser=memory)
    memory.description = (
        "Run each phase of a step separately on random weights and print its memory peak next to the plan's prediction."
    )
    _add_bench_run(memory)
    step = benches.add_parser("step", help="time whole training steps by phase, sparse and dense", allow_abbrev=False)
    step.set_defaults(command=run_step, parser=step)
    step.description = (
        "Train random weights on synthetic prompts and print the time of each phase of the last step. Default: 1 step of "
        "256 rollouts, with methods sparse_rl and dense. --method selects one method."
    )
    step.add_argument(
        "--lengths",
        choices=["uniform", "full"],
        default="uniform",
        help="response lengths: uniform between max_tokens/16 and max_tokens, or all max_tokens (full) [uniform]",
    )
    _add_bench_run(step)


def _add_bench_learner(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run_learner, parser=parser, lower="--tokens-per-microbatch or --tokens")
    parser.description = (
        "Run the learner on synthetic rollouts and print tokens/s and MFU of the update, the old log-prob pass and the "
        "shadow pass."
    )
    parser.add_argument("--model", default="1.5B", help="a shape, a hub id, a folder or tiny [1.5B]")
    parser.add_argument("--tokens", type=int, default=4096, help="response tokens per rollout [4096]")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="random tokens per prompt [256]")
    parser.add_argument(
        "--tokens-per-microbatch", type=int, default=16384, help="tokens per forward pass, prompts included [16384]"
    )
    parser.add_argument("--microbatches", type=int, default=2, help="micro-batches per update [2]")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--seed", type=int, default=0, help="seed for weights and rollouts [0]")
    add_json_flag(parser, RECORD)
    _add_head_dtype(parser)
    add_model_flags(parser)


def _add_head_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--head-dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the logits [float32]"
    )


def _add_bench_run(parser: argparse.ArgumentParser) -> None:
    from ..models.shapes import SHAPES

    known = f"a shape ({', '.join(SHAPES)}), a folder, tiny, or a recipe"
    parser.add_argument("what", metavar="MODEL_OR_RECIPE", help=known)
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="random tokens per prompt [256]")
    parser.add_argument("--memory-cap", metavar="SIZE", help="limit of the process's GPU memory, such as 22GiB")
    add_json_flag(parser, RECORD)
    parser.set_defaults(lower=LOWER)
    add_flags(parser, Config)


def run_rollout(args: argparse.Namespace) -> None:
    kv = from_flags(args, KV)
    kv.capacity  # noqa: B018 - refuse auto before a model is loaded
    from ..bench.rollout import bench

    bench(args, kv)


def run_learner(args: argparse.Namespace) -> None:
    from ..bench.learner import bench

    bench(args)


def run_memory(args: argparse.Namespace) -> None:
    config = _synthetic(args)
    from ..bench.memory import bench

    bench(args, config)


def run_step(args: argparse.Namespace) -> None:
    config = _synthetic(args)
    from ..bench.step import bench

    bench(args, config)


def _synthetic(args: argparse.Namespace) -> Config:
    from ..bench.synthetic import synthetic_config

    refuse_rank_count(args)
    return from_flags(args, Config, synthetic_config(recipe_or_model(args.what)))
