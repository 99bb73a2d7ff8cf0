"""Counter-based random numbers: the same (seed, counter) gives the same number on any device, in any order and in any
batch."""

import torch
from torch import Tensor

# splitmix64's constants as signed integers, because torch lacks unsigned 64-bit arithmetic
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
_MASK_63 = (1 << 63) - 1


def mix(seeds: Tensor, counters: Tensor | int) -> Tensor:
    """Return non-negative int64 hashes of (seed, counter), broadcast: splitmix64 applied twice to seed + counter steps."""
    return _splitmix(_splitmix(seeds) + counters) & _MASK_63


def uniform(seeds: Tensor, counters: Tensor | int) -> Tensor:
    """Return float64 numbers in [0, 1) with 52 bits. With one bit fewer than float64 holds, u * total < total also holds after
    rounding."""
    return (mix(seeds, counters) >> 11).double() * 2.0**-52


def derive(seed: int, *counters: int) -> int:
    """Apply `mix` along a path of counters, for single integers, e.g. to derive the seed of a prompt, a sample or a layer."""
    value = torch.tensor(seed, dtype=torch.int64)
    for counter in counters:
        value = mix(value, counter)
    return int(value)


def derive_all(seed: int, first: int, second: int) -> list[int]:
    """Return `derive(seed, i, j)` for all i < `first` and j < `second`, in row-major order."""
    of_first = mix(torch.tensor(seed, dtype=torch.int64), torch.arange(first))
    return mix(of_first[:, None], torch.arange(second)).flatten().tolist()


def _splitmix(value: Tensor) -> Tensor:
    value = value + _GOLDEN
    value = (value ^ _logical_shift(value, 30)) * _MULTIPLY_1
    value = (value ^ _logical_shift(value, 27)) * _MULTIPLY_2
    return value ^ _logical_shift(value, 31)


def _logical_shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
