"""Statistics of a model's queries, keys and values, gathered by forward passes over text: named tensors, frozen within a step.

A cache or a policy that needs statistics provides a `Collector`. `rollout/calibrate.py` runs the passes. Statistics are on the
CPU. They are part of a checkpoint and of a written model.
"""

# L layers, Q query heads, H kv heads, N packed tokens, D head dimension

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import UserError, first_line
from .quantize import Range, channel_range
from .storage import KeyScales

Statistics = dict[str, Tensor]

FILE = "sparse_rl.statistics"
"""Name of the file of statistics, next to a model's weights. It is a safetensors file without that suffix, because other
programs load every .safetensors file as weights."""

KEY_SCALES = ("key_centre", "key_step")
"""Names of the statistics that a quantised cache needs."""


class Collector(Protocol):
    """Gathers statistics from the attention inputs of the layers that see all tokens."""

    def add(self, layer: int, queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor, positions_1N: Tensor) -> None:
        """Add the tokens of one pass. Queries and keys are rotated."""
        ...

    def gathered(self) -> Any:
        """Return the sums so far, on the CPU, for `combine` on another rank."""
        ...

    def combine(self, parts: Sequence[Any]) -> None:
        """Replace the sums by the total of these parts, which `gathered` returned on all ranks."""
        ...

    def statistics(self) -> Statistics:
        """Return the statistics of all passes, on the CPU."""
        ...


class KeyRanges:
    """Collector of the static scales of quantised keys: the range of each channel over all tokens."""

    def __init__(self) -> None:
        self.ranges: dict[int, Range] = {}

    def add(self, layer: int, queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor, positions_1N: Tensor) -> None:
        self._widen(layer, channel_range(keys_1HND))

    def gathered(self) -> dict[int, Range]:
        return {layer: Range(each.low.cpu(), each.high.cpu()) for layer, each in self.ranges.items()}

    def combine(self, parts: Sequence[dict[int, Range]]) -> None:
        self.ranges = {}
        for layer, new in (pair for part in parts for pair in part.items()):
            self._widen(layer, new)

    def _widen(self, layer: int, new: Range) -> None:
        self.ranges[layer] = self.ranges[layer].union(new) if layer in self.ranges else new

    def statistics(self) -> Statistics:
        scales = KeyScales.of([self.ranges[layer] for layer in sorted(self.ranges)])
        return dict(zip(KEY_SCALES, (scales.centre_LHD.cpu(), scales.step_LHD.cpu()), strict=True))


def key_scales(statistics: Statistics) -> KeyScales:
    return KeyScales(*(statistics[name] for name in KEY_SCALES))


def save(statistics: Statistics, folder: Path) -> None:
    """Write the statistics into a folder; do nothing if there are none."""
    if statistics:
        save_file({name: tensor.contiguous() for name, tensor in statistics.items()}, folder / FILE)


def load(folder: Path) -> Statistics:
    """Return the statistics in a folder; empty if there are none."""
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        return load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}): remove it to gather the statistics again.") from error
