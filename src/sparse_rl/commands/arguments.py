"""Arguments that several commands share."""

import argparse
import re
from pathlib import Path
from typing import Any

from ..config import recipe, recipe_names
from ..errors import UserError

LOWER = "--rollout.slots or --optimizer.tokens-per-microbatch"
"""Options that the out-of-memory error suggests to lower if there is no plan."""


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return int(text)


def add_json_flag(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", type=_output_file, metavar="FILE", help=f"also write {what} to this file")


def _output_file(text: str) -> Path:
    """Parse the path of a file that is written at the end. Its folder must exist at the start."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist: create it first")
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: pass the name of a file")
    return Path(text)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="[bfloat16 on a GPU, float32 on a CPU]")
    parser.add_argument("--device", help="device, such as cpu or cuda:0 [cuda if available]")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's custom code from the hub")


def is_recipe(what: str) -> bool:
    return what in recipe_names() or what.endswith(".toml")


def recipe_or_model(what: str) -> dict[str, Any]:
    """Return the config values of a recipe. If `what` is not a recipe, return `{"model": {"path": what}}`."""
    return recipe(what) if is_recipe(what) else {"model": {"path": what}}


def refuse_rank_count(args: argparse.Namespace) -> None:
    """Raise UserError if --ranks.count was passed to a command that runs ranks. A value in config.toml is allowed."""
    given = getattr(args, "ranks.count")
    if given is not None:
        raise UserError(
            f"--ranks.count {given} has no effect here: the launcher sets the number of ranks. Start ranks with "
            "torchrun or --ray.workers, or use sparse-rl plan --gpus."
        )
