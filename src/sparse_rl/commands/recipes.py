"""`sparse-rl recipes`: list the shipped recipes, or show all values of one recipe."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run, parser=parser)
    parser.description = "List the built-in recipes and their requirements, or print one recipe."
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="recipe to print as TOML")


def run(args: argparse.Namespace) -> None:
    from ..plan.recipe_table import print_recipe, print_recipes

    if args.recipe:
        print_recipe(args.recipe)
    else:
        print_recipes()
