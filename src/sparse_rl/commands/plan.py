"""`sparse-rl plan`: compute the memory and time of a training step, and whether the run fits on a GPU."""

import argparse

from ..config import BUILT_IN_POLICIES, Config, add_flags, flag_values, from_flags, is_import_path
from .arguments import add_json_flag, is_recipe, recipe_or_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..models.shapes import SHAPES

    parser.set_defaults(command=run, parser=parser)
    parser.description = "Compute the memory and time of a run from the model's config.json. All flags of train are accepted."
    parser.add_argument(
        "what",
        metavar="MODEL_OR_RECIPE",
        help=f"a shape ({', '.join(SHAPES)}), a hub id, a folder, tiny, or a recipe",
    )
    parser.add_argument(
        "--longest",
        action="store_true",
        help="print the longest response that trains instead; --gpu-memory then takes several sizes: 24GB,80GB",
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="GPU memory, such as 24GiB or 80GB [memory of --gpu]")
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of the machine, such as 256GiB [of this machine]")
    parser.add_argument("--gpu", metavar="NAME", help="GPU whose speed is assumed, such as 'RTX 4090' [H200]")
    parser.add_argument("--gpus", dest="ranks.count", metavar="N", help="number of GPUs; alias of --ranks.count [1]")
    parser.add_argument(
        "--prompt-tokens", type=int, default=256, metavar="N", help="length of the longest prompt in tokens [256]"
    )
    parser.add_argument("--max-tokens", dest="rollout.max_tokens", metavar="N", help="alias of --rollout.max-tokens")
    add_json_flag(parser, "the plan")
    add_flags(parser, Config)


def run(args: argparse.Namespace) -> None:
    from ..plan.longest import refuse_length, show_longest
    from ..plan.output import show_plan

    base = recipe_or_model(args.what)
    if not is_recipe(args.what) and not {"data", "eval"} & flag_values(args, Config).keys():
        base["eval"] = {"problems": 0}  # without a recipe there are no problems to evaluate
    config = from_flags(args, Config, base)
    _refuse_unknown_policy(config.sampler_kv.policy)
    options = {
        "gpu_memory": args.gpu_memory,
        "gpu_name": args.gpu,
        "host_memory": args.host_memory,
        "prompt_tokens": args.prompt_tokens,
        "file": args.json,
    }
    if args.longest:
        refuse_length(getattr(args, "rollout.max_tokens"))
        show_longest(config, is_recipe=is_recipe(args.what), **options)
    else:
        show_plan(config, **options)


def _refuse_unknown_policy(name: str) -> None:
    """Raise UserError if no policy has this name. A custom policy is not imported."""
    if name not in BUILT_IN_POLICIES and not is_import_path(name):
        from ..kv.policies import refuse_unknown  # imports torch

        refuse_unknown(name)
