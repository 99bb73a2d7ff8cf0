"""`sparse-rl recipes`: list the shipped recipes, or show all values of one recipe."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser)
    parser.description = "List the shipped recipes with what they need, or show every value of one."
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="recipe to show as TOML")


def run(args: argparse.Namespace) -> None:
    from ..plan.recipe_table import print_recipe, print_recipes

    if args.recipe:
        print_recipe(args.recipe)
    else:
        print_recipes()
