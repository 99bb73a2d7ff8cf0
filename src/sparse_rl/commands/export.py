"""`sparse-rl export`: write the weights of a run as a Hugging Face model folder, or push them to the hub."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser)
    parser.description = "Export the weights of a run as a model folder with a model card, for transformers, vLLM and the hub."
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="folder to write; optional with --push")
    parser.add_argument("--step", type=step, metavar="N|best", help="step of the checkpoint, or best [the last step]")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into the weights")
    parser.add_argument("--push", metavar="REPO", help="upload to this repository of the hub, such as me/my-model")
    parser.add_argument("--private", action="store_true", help="create a private repository")


def step(text: str) -> int | str:
    return text if text == "best" else int(text)


def run(args: argparse.Namespace) -> None:
    from ..train.export import export

    export(args.run, args.out, step=args.step, merge=args.merge, push=args.push, private=args.private)
