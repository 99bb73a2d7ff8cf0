"""`sparse-rl recipes`: list the shipped recipes. The plan gives the GPU each needs, and the roofline model its duration."""

import re

from rich.table import Table

from ..config import Config, recipe, recipe_names, recipe_text, to_toml
from ..format import duration, gib
from ..terminal import wide_console
from .dimensions import dimensions
from .evaluation import run_s
from .memory import CONTEXT_BYTES, Plan, make_plan
from .roofline import GPU, GPUS

CARDS = ("RTX 4090", "A6000", "H100", "H200")
"""One GPU of each memory size, smallest first."""
ENOUGH_SLOTS = 64
"""Minimum number of slots for fast decoding. If a GPU holds fewer, the table names the next larger GPU."""
SMALL = 200_000_000
"""Number of parameters below which a recipe can also run on a CPU."""


def print_recipes() -> None:
    table = Table(title="sparse-rl train RECIPE, or sparse-rl recipes RECIPE to see its values", title_justify="left")
    for heading in ("recipe", "model", "method", "data", "cache", "GPU", "peak GiB", "time, computed"):
        table.add_column(
            heading, justify="right" if heading == "peak GiB" else "left", no_wrap=heading in ("recipe", "model", "data")
        )
    for name in recipe_names():
        table.add_row(name, *_row(name))
    console = wide_console()
    console.print(table)
    console.print_line(
        f"Computed values: the smallest of {', '.join(CARDS)} that fits the run, the predicted memory peak on it, and the "
        "computed time of all steps and evaluations with full-length responses."
    )


def print_recipe(name: str) -> None:
    config = Config(**recipe(name))
    wide_console().print_line(to_toml(config) + config.defaults_comment, end="")


def _row(name: str) -> tuple[str, ...]:
    config = Config(**recipe(name))
    kv, data = config.kv, config.data.train.rpartition("/")[2].removesuffix(".jsonl")
    method = ", ".join(config.compare) or config.method
    gpu, plan = smallest_card(config)
    card = f"{gpu.name}, or a CPU" if plan.dims.params < SMALL else gpu.name
    measured = re.search(r"^# Measured: (.*?)\.?$", recipe_text(name), flags=re.MULTILINE)
    time = f"measured: {measured[1]}" if measured else duration(run_s(plan, gpu))
    return config.model.path.rpartition("/")[2], method, data, kv.label, card, gib(plan.peak_bytes), time


def smallest_card(config: Config) -> tuple[GPU, Plan]:
    """Return (the smallest of `CARDS` that fits the run with enough slots, its plan). If none does, return the largest."""
    dims = dimensions(config.model.path)
    enough = min(ENOUGH_SLOTS, config.rollout.rollouts_per_step)
    for card in CARDS:
        gpu = GPUS[card.lower()]
        plan = make_plan(config, dims, memory_bytes=gpu.memory_bytes - CONTEXT_BYTES)
        if plan.fits and plan.slots >= enough:
            break
    return gpu, plan
