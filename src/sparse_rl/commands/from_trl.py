"""`sparse-rl from-trl`: convert the flags of `trl grpo` to a recipe."""

import argparse
import sys

from ..errors import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser)
    parser.description = (
        "Print the recipe for the flags of `trl grpo`, and a note on stderr for each flag that is not converted exactly. "
        "Redirect it to a file: sparse-rl from-trl --config grpo.yaml > mine.toml"
    )
    parser.add_argument(
        "flags", metavar="FLAGS", nargs="*", help="a TRL command or its flags, such as --config grpo.yaml --num_generations 8"
    )


def run(args: argparse.Namespace) -> None:
    from ..integrations.from_trl import convert

    recipe, notes = convert(args.flags)
    for note in notes:
        say(note)
    sys.stdout.write(recipe)
