"""Parse the command line and dispatch to `commands`. Imports no torch, so that `--help` prints immediately."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from . import __version__
from .commands import bench, eval, export, from_trl, generate, plan, recipes, report, train
from .commands.arguments import LOWER
from .errors import UserError, quiet_packages, say
from .exit_codes import exit_on_error
from .integrations import trl_flags
from .text import did_you_mean


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. A user error ends the process with one line and exit code 2."""
    quiet_packages()
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        # Sampler and learner alternate and allocate blocks of all sizes. With fixed segments, fragmentation wasted 1.4 of 22
        # GiB.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        with suppress(OSError):
            # as Python does on stderr: escape characters that the encoding lacks
            sys.stdout.reconfigure(errors="backslashreplace")
    args = argparse.Namespace()
    with exit_on_error(lambda: getattr(args, "lower", LOWER)):
        args = _parse(build_parser(), list(sys.argv[1:] if argv is None else argv))
        args.command(args)


class Parser(argparse.ArgumentParser):
    """Argument parser that prints an error in one line."""

    def error(self, message: str):
        say(f"{message}; see {self.prog} --help.")
        self.exit(2)


COMMANDS = {
    "train": (train, "post-train a model with rollouts in a bounded KV cache"),
    "eval": (eval, "score a model on benchmarks with different KV caches"),
    "plan": (plan, "compute memory use and step time on a GPU"),
    "recipes": (recipes, "list the shipped recipes with model, GPU and time"),
    "report": (report, "show runs: curves, rollouts, alerts"),
    "export": (export, "export a run's weights as a Hugging Face model folder"),
    "from-trl": (from_trl, "convert the flags of TRL's GRPO to a recipe"),
    "generate": (generate, "sample from a model and show KV use and speed"),
    "bench": (bench, "benchmark this machine"),
}


@cache
def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sparse-rl", description="Reinforcement learning with rollouts in a bounded KV cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"sparse-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (command, summary) in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=summary, allow_abbrev=False))
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    if argv[:1] == ["from-trl"] and argv[1:2] not in (["-h"], ["--help"]):
        argv = ["from-trl", "--", *argv[1:]]  # the flags after it are TRL's, so TRL's parser reads them
    args, unknown = parser.parse_known_args(argv)
    if unknown and args.command is train.run and (found := trl_flags.hint(unknown[0])):
        raise UserError(found)
    if unknown:
        flags = sorted(set(re.findall(r"--[\w.-]+", args.parser.format_help())))
        hint = did_you_mean(unknown[0].split("=")[0], flags, f"see {args.parser.prog} --help.")
        raise UserError(f"unknown argument {unknown[0]}: {hint}")
    return args


if __name__ == "__main__":
    main()
