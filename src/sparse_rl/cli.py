"""The command line: one function per command. torch is imported inside them, so that `--help` answers at once."""

import argparse
import difflib
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import __version__
from .config import (
    KV,
    TASKS,
    Config,
    DataConfig,
    RewardConfig,
    Sampling,
    add_flags,
    flags_given,
    from_flags,
    recipe,
    recipe_names,
)
from .ending import one_line
from .errors import UserError, say, without_torchaos_warnings

LOWER = "--rollout.slots or --optimizer.tokens-per-microbatch"
"""What to lower where memory runs out and no plan says better."""


def main(argv: Sequence[str] | None = None) -> None:
    without_torchaos_warnings()
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        # Sampler and learner take turns in blocks of all sizes: in fixed segments 1.4 of 22 GiB were lost to gaps
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no error, as for stderr
    args = argparse.Namespace()
    with one_line(lambda: getattr(args, "lower", LOWER)):
        args = _parse(build_parser(), list(sys.argv[1:] if argv is None else argv))
        args.command(args)


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str):
        say(f"{message}; see {self.prog} --help.")
        self.exit(2)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sparse-rl", description="Reinforcement learning with rollouts in a bounded KV cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"sparse-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands.add_parser("train", help="post-train a model, rollouts in a bounded cache", allow_abbrev=False))
    _add_eval(commands.add_parser("eval", help="score a model on benchmarks under several caches", allow_abbrev=False))
    _add_plan(commands.add_parser("plan", help="what fits on a GPU and what a step costs, computed", allow_abbrev=False))
    _add_recipes(commands.add_parser("recipes", help="what is shipped, with model, GPU and time", allow_abbrev=False))
    _add_report(commands.add_parser("report", help="look at runs: curves, rollouts, what went wrong", allow_abbrev=False))
    _add_export(commands.add_parser("export", help="write a run's weights as a Hugging Face folder", allow_abbrev=False))
    _add_generate(commands.add_parser("generate", help="sample from a model and see what it costs", allow_abbrev=False))
    _add_bench(commands.add_parser("bench", help="measure this machine", allow_abbrev=False))
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = sorted(set(re.findall(r"--[\w.-]+", args.parser.format_help())))
        close = difflib.get_close_matches(unknown[0].split("=")[0], flags, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {args.parser.prog} --help."
        raise UserError(f"unknown argument {unknown[0]}: {hint}")
    return args


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=train, parser=parser, lower=LOWER)
    parser.description = "Post-train a model by reinforcement learning. Every flag below is a key of a recipe, too."
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help=f"a TOML file or a shipped one: {', '.join(recipe_names())}"
    )
    parser.add_argument("--dry-run", action="store_true", help="show configuration, batch and first prompt, and do nothing")
    parser.add_argument("--resume", action="store_true", help="continue the run in run_dir from its last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in run_dir first")
    add_flags(parser, Config)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=evaluate, parser=parser, lower="--slots or --max-tokens")
    parser.description = (
        "Sample benchmarks with the same seeds under several caches and compare: scores with 95 % intervals, lengths, memory. "
        "What is done stays in --out: run the same command again and it goes on."
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
    parser.add_argument("--samples-per-prompt", type=_count, metavar="N", help="of each problem [the task's: 1, contests 32]")
    parser.add_argument("--pass-at", metavar="KS", help="pass@k for these k, such as 1,8,32 [powers of two up to the samples]")
    parser.add_argument(
        "--mismatch", action="store_true", help="replay every rollout and say how far sampler and model are apart"
    )
    parser.add_argument("--problems", type=_count, metavar="N", help="only the first N of each benchmark [all]")
    parser.add_argument("--max-tokens", type=_count, metavar="N", help="of a response [the task's: 8192, contests 16384]")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="divides the logits; 0 is greedy [0.8]")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="draw from the likeliest with this much [0.95]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same for every cache [0]")
    parser.add_argument("--slots", type=_count, metavar="N", help="rollouts at a time [what memory allows; 64 on a CPU]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where samples and figures go [runs/eval/MODEL-…]")
    parser.add_argument("--overwrite", action="store_true", help="start anew where --out holds an evaluation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--rows", action="store_true", help="also print rows for a LaTeX table")
    _add_model_flags(parser)
    add_flags(parser, KV)
    add_flags(parser, DataConfig, without=("train", "test", "max_prompt_tokens"))
    add_flags(parser, RewardConfig)


def _count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=plan, parser=parser)
    parser.description = "Compute from a model's config.json what a run needs and what fits. Every flag of train is one here."
    parser.add_argument(
        "what",
        metavar="MODEL_OR_RECIPE",
        help="a shape (0.5B, 1.5B, 3B, 7B, 14B, 32B, 72B), a hub id, a folder, tiny, or a recipe as for train",
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="such as 24GiB or 80GB [that of --gpu]")
    parser.add_argument("--gpu", metavar="NAME", help="whose speed is computed with, such as 'RTX 4090' [H200]")
    parser.add_argument("--gpus", dest="ranks.count", metavar="N", help="how many of them: the same as --ranks.count [1]")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="of the longest prompt [256]")
    parser.add_argument("--max-tokens", dest="rollout.max_tokens", metavar="N", help="the same as --rollout.max-tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to a file")
    add_flags(parser, Config)


def _add_recipes(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=recipes, parser=parser)
    parser.description = "List the shipped recipes with what they need, or show every value of one."
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="whose values are shown, as TOML")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=report, parser=parser)
    parser.description = (
        "Write one HTML file that needs no network from run folders: the outcome in words, alerts, every curve, rollouts token by "
        "token and what the cache held. Runs that differ only in the seed are drawn as one line with a band."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or one with runs in it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page goes [report.html in the first RUN]")
    parser.add_argument("--serve", action="store_true", help="watch a live run in a browser, on this machine only")
    parser.add_argument("--port", type=int, default=8642, metavar="N", help="of --serve; 0 is any that is free [8642]")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write the main plots there as SVG and PNG")


def _step(text: str) -> int | str:
    return text if text == "best" else int(text)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=export, parser=parser)
    parser.description = "Write the weights of a run as a folder that transformers and vLLM read."
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--step", type=_step, metavar="N|best", help="the checkpoint of this step [the last]")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into the weights")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=generate, parser=parser, lower="--slots, --kv.budget or --max-tokens")
    parser.description = "Sample from a model with a bounded KV cache; the text streams, then come KV use and speed."
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a hub id, a folder, a GGUF file, smollm2-135m, or tiny: the embedded model, which only adds two-digit numbers, as in 15:47+85=",
    )
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="+", help="text; rendered with the model's chat template if it has one"
    )
    parser.add_argument("--samples-per-prompt", type=int, default=1, metavar="N", help="rollouts of each prompt [1]")
    parser.add_argument("--raw", action="store_true", help="take the prompts as they are, without the chat template")
    parser.add_argument("--slots", type=int, default=64, metavar="N", help="rollouts that run at a time, at most [64]")
    _add_model_flags(parser)
    add_flags(parser, KV)
    others = [name for name in DataConfig.model_fields if name != "chat_template_kwargs"]
    add_flags(parser, DataConfig, without=others)
    add_flags(parser, Sampling, prefix="")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from .models.shapes import SHAPES

    benches = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    rollout = benches.add_parser("rollout", help="transformers generate, our dense and our sparse engine", allow_abbrev=False)
    rollout.set_defaults(command=bench_rollout, parser=rollout, lower="--batch, --kv.budget or --max-tokens")
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
        help="of responses: all of max-tokens, or uniform from a sixteenth of it to all of it [full]",
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
    rollout.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling [0]")
    rollout.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures, with machine and versions, to a file"
    )
    _add_model_flags(rollout)
    add_flags(rollout, KV)
    _add_bench_learner(benches.add_parser("learner", help="an update against the GPU's peak", allow_abbrev=False))
    memory = benches.add_parser("memory", help="what plan predicts against what a GPU measures, by phase", allow_abbrev=False)
    memory.set_defaults(command=bench_memory, parser=memory)
    memory.description = "Run the phases of a step apart on random weights, and print their peaks beside the plan's."
    _add_bench_run(memory)
    step = benches.add_parser("step", help="whole training steps by phase, sparse and dense", allow_abbrev=False)
    step.set_defaults(command=bench_step, parser=step)
    step.description = (
        "Train on random weights and made-up prompts and print what each phase of the last step took: 1 step of 256 rollouts "
        "unless --steps and the others say otherwise, sparse_rl and dense unless --method names one."
    )
    step.add_argument(
        "--lengths",
        choices=["uniform", "full"],
        default="uniform",
        help="of responses: uniform from a sixteenth of max_tokens to all of it, or all of full length [uniform]",
    )
    _add_bench_run(step)


def _add_bench_learner(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=bench_learner, parser=parser, lower="--tokens-per-microbatch or --tokens")
    parser.description = (
        "Learn from made-up rollouts: the update, the pass before it and the shadow pass, as tokens/s and MFU."
    )
    parser.add_argument("--model", default="1.5B", help="a shape, a hub id, a folder or tiny [1.5B]")
    parser.add_argument("--tokens", type=int, default=4096, help="response tokens of each rollout [4096]")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="random tokens of each prompt [256]")
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384, help="in one pass, prompts included [16384]")
    parser.add_argument("--microbatches", type=int, default=2, help="of an update [2]")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again in backward")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rollouts [0]")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures, with machine and versions, to a file"
    )
    _add_model_flags(parser)


def _add_bench_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODEL_OR_RECIPE", help="a shape (0.5B, 1.5B, 3B, 7B), a folder, tiny, or a recipe")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="random tokens of each prompt [256]")
    parser.add_argument("--memory-cap", metavar="SIZE", help="let the process have no more of the GPU, such as 22GiB")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures, with machine and versions, to a file"
    )
    parser.set_defaults(lower=LOWER)
    add_flags(parser, Config)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="[bfloat16 on a GPU, float32 on a CPU]")
    parser.add_argument("--device", help="such as cpu or cuda:0 [cuda if there is one]")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from the hub")


def train(args: argparse.Namespace) -> None:
    from .train.refusal import refused_for_good

    with refused_for_good():
        _train(args)


def _train(args: argparse.Namespace) -> None:
    base = recipe(args.recipe) if args.recipe else {}
    if args.resume and not args.recipe:
        from .train.run_folder import RunFolder

        folder = RunFolder(args.run_dir or Config().run_dir, writes=False)
        base = folder.stored_config() | {"run_dir": str(folder.name)} if folder.exists else {}
    if args.method and not args.compare:  # a method that is named is the one that is meant
        base.pop("compare", None)
    config = from_flags(args, Config, base)
    if args.resume and args.overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it: choose one.")
    from .train import command

    if args.dry_run:
        command.dry_run(config)
    elif config.ray.workers:
        from .integrations import ray

        ray.train(config, resume=args.resume, overwrite=args.overwrite)
    else:
        command.train(config, resume=args.resume, overwrite=args.overwrite)


def evaluate(args: argparse.Namespace) -> None:
    from .evaluate.compare import settings
    from .models.stored_kv import stored_kv

    given = flags_given(args, KV)
    caches = settings(args.compare, given, {} if args.compare else stored_kv(args.model, given.get("policy")))
    workers = min(8, max(2, (os.cpu_count() or 2) // 2))  # a GPU waits while a chunk is graded
    data, reward = from_flags(args, DataConfig), from_flags(args, RewardConfig, {"workers": workers})
    from .evaluate.command import command

    command(args, caches, data, reward)


def plan(args: argparse.Namespace) -> None:
    from .plan.command import command

    config = from_flags(args, Config, _named(args.what))
    command(config, gpu_memory=args.gpu_memory, gpu_name=args.gpu, prompt_tokens=args.prompt_tokens, file=args.json)


def recipes(args: argparse.Namespace) -> None:
    from .plan.recipe_table import listing, show

    if args.recipe:
        show(args.recipe)
    else:
        listing()


def _named(what: str) -> dict[str, Any]:
    """The values of a recipe, or of a run of a model."""
    is_recipe = what in recipe_names() or what.endswith(".toml")
    return recipe(what) if is_recipe else {"model": {"path": what}}


def report(args: argparse.Namespace) -> None:
    from .report.command import command

    command(args)


def export(args: argparse.Namespace) -> None:
    from .train import command

    command.export(args.run, args.out, step=args.step, merge=args.merge)


def generate(args: argparse.Namespace) -> None:
    from .models.stored_kv import stored_kv

    stored = stored_kv(args.model, flags_given(args, KV).get("policy"))
    kv, sampling = from_flags(args, KV, stored), from_flags(args, Sampling)
    data = from_flags(args, DataConfig, {"raw": args.raw})
    from .rollout.console import stream

    stream(args, kv, sampling, data)


def bench_rollout(args: argparse.Namespace) -> None:
    kv = from_flags(args, KV)
    from .bench.rollout import bench

    bench(args, kv)


def bench_learner(args: argparse.Namespace) -> None:
    from .bench.learner import bench

    bench(args)


def bench_memory(args: argparse.Namespace) -> None:
    from .bench.synthetic import made_up_config

    config = from_flags(args, Config, made_up_config(_named(args.what)))
    from .bench.memory import bench

    bench(args, config)


def bench_step(args: argparse.Namespace) -> None:
    from .bench.synthetic import made_up_config

    config = from_flags(args, Config, made_up_config(_named(args.what)))
    from .bench.step import bench

    bench(args, config)


if __name__ == "__main__":
    main()
