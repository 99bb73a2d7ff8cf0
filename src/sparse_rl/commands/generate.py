"""`sparse-rl generate`: sample from a model, then print KV use and speed."""

import argparse

from ..config import KV, DataConfig, Sampling, add_flags, flag_values, from_flags
from .arguments import add_model_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser, lower="--slots, --kv.budget or --max-tokens")
    parser.description = "Sample from a model with a bounded KV cache. Text is streamed; KV use and speed follow."
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=(
            "a hub id, a folder, a GGUF file, smollm2-135m, or tiny (an embedded model that only adds two-digit numbers; "
            "example prompt: 15:47+85=)"
        ),
    )
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="+", help="prompt text; rendered with the model's chat template if it has one"
    )
    parser.add_argument("--samples-per-prompt", type=int, default=1, metavar="N", help="rollouts per prompt [1]")
    parser.add_argument("--raw", action="store_true", help="use the prompts verbatim, without the chat template")
    parser.add_argument("--slots", type=int, default=64, metavar="N", help="maximum rollouts that run at once [64]")
    add_model_flags(parser)
    add_flags(parser, KV)
    others = [name for name in DataConfig.model_fields if name != "chat_template_kwargs"]
    add_flags(parser, DataConfig, without=others)
    add_flags(parser, Sampling, prefix="")


def run(args: argparse.Namespace) -> None:
    from ..models.stored_kv import stored_kv

    stored = stored_kv(args.model, flag_values(args, KV))
    kv, sampling = from_flags(args, KV, stored), from_flags(args, Sampling)
    data = from_flags(args, DataConfig, {"raw": args.raw})
    from ..rollout.console import stream

    stream(args, kv, sampling, data)
