"""`sparse-rl train`: post-train a model."""

import argparse
import sys

from ..config import Config, add_flags, from_flags, recipe, recipe_names
from ..errors import UserError
from .arguments import LOWER, refuse_rank_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser, lower=LOWER)
    parser.description = "Post-train a model with reinforcement learning. Every flag below is also a recipe key."
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help=f"a TOML file or a built-in recipe: {', '.join(recipe_names())}"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the resolved configuration, batch and first prompt without running"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in run_dir from its last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in run_dir first")
    add_flags(parser, Config)


def run(args: argparse.Namespace) -> None:
    from ..train.refusal import refused_for_good

    with refused_for_good():
        _run(args)


def _run(args: argparse.Namespace) -> None:
    refuse_rank_count(args)
    base = recipe(args.recipe) if args.recipe else {}
    if args.resume and not args.recipe:
        from ..train.run_folder import RunFolder

        folder = RunFolder(args.run_dir or Config().run_dir, writes=False)
        base = folder.stored_config() | {"run_dir": str(folder.name)} if folder.exists else {}
    if args.method and not args.compare:  # --method alone overrides the recipe's comparison
        base.pop("compare", None)
    config = from_flags(args, Config, base)
    if args.resume and args.overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it: choose one.")
    from ..train import run

    if args.dry_run:
        run.dry_run(config)
    elif config.ray.workers:
        from ..integrations import ray

        ray.train(config, resume=args.resume, overwrite=args.overwrite)
    else:
        runs = run.train(config, resume=args.resume, overwrite=args.overwrite)
        if not all(each.finished for each in runs):
            sys.exit(130)
