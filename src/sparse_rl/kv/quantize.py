"""Quantise keys and values to 8 or 4 bits: formats, the scales they share, byte counts, and a straight-through gradient.

A stored number stands for centre + step * code. `Scales` come from the range of the values. `encode` turns values into codes and
`decode` turns codes back; a `Scheme` does both for keys and values. `encode` divides by the stored step, so rounding the step to
half precision adds no error. The functions know neither models nor caches.
"""

# x any leading dimensions, B rows, H kv heads, T tokens, D head dimension, G groups of channels, N blocks of tokens

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels.codes import LARGEST_STEP

SCALE_DTYPE = torch.float16
"""Dtype of stored steps and centres. It is finer than bfloat16, which matters for the centre of a channel with a large bias."""
SMALLEST_STEP = 2.0**-24  # smallest positive float16; a constant group would otherwise have step 0
LARGEST = torch.finfo(SCALE_DTYPE).max


@dataclass(frozen=True)
class Format:
    """Number format of the codes."""

    name: str
    bits: int
    low: float
    """Lowest code."""
    high: float
    """Highest code."""


INT8 = Format("int8", 8, -128, 127)
INT4 = Format("int4", 4, -8, 7)
E4M3 = Format("e4m3", 8, -448, 448)


class Range(NamedTuple):
    """Lowest and highest value of every group of numbers that share a scale."""

    low: Tensor
    high: Tensor

    def union(self, other: "Range") -> "Range":
        """Return the range that covers both."""
        return Range(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def widened(self, factor: float) -> "Range":
        """Return the range with its width multiplied. Static scales then clamp fewer values outside the calibration data."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return Range(middle - factor * half, middle + factor * half)


@dataclass(frozen=True)
class Scales:
    """Stored scales. Each belongs to `tokens` consecutive tokens and `channels` consecutive channels; 1 also broadcasts."""

    step: Tensor
    centre: Tensor | None = None
    tokens: int = 1
    channels: int = 1

    def spread(self, scale: Tensor, tokens: int) -> Tensor:
        """Return the scale of every value as float32, in a shape that broadcasts over `tokens` tokens."""
        if self.tokens > 1:
            scale = scale.repeat_interleave(self.tokens, dim=-2)[..., :tokens, :]
        if self.channels > 1 and scale.shape[-1] > 1:
            scale = scale.repeat_interleave(self.channels, dim=-1)
        return scale.float()


# Ranges


def group_range(values_xTD: Tensor, tokens: int, channels: int) -> Range:
    """Return the range [x, N, G] of each block of `tokens` tokens and each group of `channels` channels.

    The last block may have fewer tokens. The number of channels must divide D.
    """
    length, dim = values_xTD.shape[-2:]
    if dim % channels:
        raise UserError(
            f"channels = {channels} is invalid: it must divide the head dimension {dim}. Try {math.gcd(dim, channels)}."
        )
    if rest := -length % tokens:  # repeat the last token, which changes no minimum or maximum
        values_xTD = torch.cat([values_xTD, values_xTD[..., -1:, :].expand(*values_xTD.shape[:-2], rest, dim)], dim=-2)
    grouped = values_xTD.detach().float().unflatten(-1, (dim // channels, channels)).unflatten(-3, (-1, tokens))
    return Range(grouped.amin(dim=(-3, -1)), grouped.amax(dim=(-3, -1)))


def channel_range(values_BHTD: Tensor) -> Range:
    """Return the range [H, 1, D] of each head and channel over all rows and tokens: a calibration statistic."""
    values_BHTD = values_BHTD.detach().float()
    return Range(values_BHTD.amin(dim=(0, 2))[:, None], values_BHTD.amax(dim=(0, 2))[:, None])


def pair_range(keys_BHTD: Tensor) -> Range:
    """Return the range [H, 1, D] of each head and rotary pair of channels, (d, d + D/2), over all rows and tokens.

    It is plus and minus the largest length of the pair as a vector. Rotation keeps that length, so the range also covers keys
    at later positions than those of the calibration.
    """
    first, second = keys_BHTD.detach().float().chunk(2, dim=-1)
    length_H1F = torch.hypot(first, second).amax(dim=(0, 2))[:, None]
    high_H1D = torch.cat([length_H1F, length_H1F], dim=-1)
    return Range(-high_H1D, high_H1D)


def scales_of(covered: Range, format: Format, *, symmetric: bool, tokens: int = 1, channels: int = 1) -> Scales:
    """Return the smallest scales whose codes cover the range. Symmetric scales have no centre.

    A symmetric step of int4 may be negative: it maps the value of largest magnitude to code -8, which has no positive
    counterpart. The step is then an eighth of that value, not a seventh. A value of the other sign may lose one step.
    """
    low, high = covered
    centre = None
    if symmetric and format == INT4:
        step = torch.where(high > -low, high, low) / format.low
    elif symmetric:
        step = torch.maximum(low.abs(), high.abs()) / format.high
    else:
        share = format.low / (format.high - format.low)
        centre = (low - share * (high - low)).clamp(-LARGEST, LARGEST).to(SCALE_DTYPE)
        # from the rounded centre, so that the codes cover the whole range
        step = torch.maximum((high - centre.float()) / format.high, (low - centre.float()) / format.low)
    step = step.clamp(-LARGEST_STEP, LARGEST_STEP).to(SCALE_DTYPE)
    return Scales(torch.where(step == 0, SMALLEST_STEP, step), centre, tokens, channels)


# Codes


def encode(values_xTD: Tensor, scales: Scales, format: Format) -> Tensor:
    """Return the codes: int8 or float8 [x, T, D], or packed 4-bit codes as uint8 [x, T, D/2]. Values beyond the range are
    clamped, halves are rounded to even."""
    tokens = values_xTD.shape[-2]
    centred = values_xTD.float()
    if scales.centre is not None:
        centred = centred - scales.spread(scales.centre, tokens)
    ratio = (centred / scales.spread(scales.step, tokens)).clamp(format.low, format.high)
    if format == E4M3:
        return ratio.to(_float8())
    codes = ratio.round().to(torch.int8)
    return pack(codes) if format.bits == 4 else codes


def decode(codes: Tensor, scales: Scales, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [x, T, D] that the codes stand for."""
    numbers_xTD = (unpack(codes) if format.bits == 4 else codes).float()
    tokens = numbers_xTD.shape[-2]
    values_xTD = numbers_xTD * scales.spread(scales.step, tokens)
    if scales.centre is not None:
        values_xTD = values_xTD + scales.spread(scales.centre, tokens)
    return values_xTD.to(dtype)


def pack(codes_xD: Tensor) -> Tensor:
    """Pack int8 codes from -8 to 7 into uint8 [x, D/2]. Byte d holds channel d in its low half and d + D/2 in its high half.

    A kernel then reads both halves of the head with one load and multiplies each with its half of the query.
    """
    if codes_xD.shape[-1] % 2:
        raise UserError(f"head dimension = {codes_xD.shape[-1]} is odd: 4-bit codes need an even one. Use 8 bits.")
    low, high = (codes_xD + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack(packed_xd: Tensor) -> Tensor:
    """Return the int8 codes from -8 to 7 of packed bytes, [x, D]."""
    return torch.cat([packed_xd & 15, packed_xd >> 4], dim=-1).to(torch.int8) - 8


def _float8() -> torch.dtype:
    found = getattr(torch, "float8_e4m3fn", None)
    if found is None:
        raise UserError(f"torch {torch.__version__} has no float8_e4m3fn: use int8.")
    return found


# Schemes


@dataclass(frozen=True)
class Scheme:
    """How keys or values are stored: the format, and which numbers share a scale."""

    format: Format
    tokens: int | None = 1
    """Tokens that share a scale; None for a static scale, which all tokens share."""
    channels: int | None = None
    """Channels that share a scale; None for all channels of a head."""
    symmetric: bool = True
    """False if scales have a centre. A static centre of keys is free: it adds the same number to all logits of a query."""
    equalised: bool = False
    """Shift and divide each channel by its static centre and step first. A scale of several channels then fits each of them."""

    def bytes_per_token(self, dim: int) -> float:
        """Return the bytes of one token in one head, its scales included. Static scales belong to no token."""
        codes = dim * self.format.bits / 8
        if self.tokens is None:
            return codes
        scales = (dim // (self.channels or dim)) * (1 if self.symmetric else 2)
        return codes + scales * SCALE_DTYPE.itemsize / self.tokens

    def store(self, values_xTD: Tensor, statistics: Range | Scales | None = None) -> tuple[Tensor, Scales | None]:
        """Return the codes and the scales to store with them, None if all scales are static.

        `statistics` is a `channel_range` or `pair_range` of other values, or the static scales themselves.
        """
        if self.tokens is None:
            return encode(values_xTD, self.static_scales(statistics), self.format), None
        if self.equalised:
            static = self.static_scales(statistics)
            assert static.centre is not None
            values_xTD = (values_xTD.float() - static.centre.float()) / static.step.float()
        channels = self.channels or values_xTD.shape[-1]
        covered = group_range(values_xTD, self.tokens, channels)
        scales = scales_of(covered, self.format, symmetric=self.symmetric, tokens=self.tokens, channels=channels)
        return encode(values_xTD, scales, self.format), scales

    def restore(
        self,
        codes: Tensor,
        scales: Scales | None,
        statistics: Range | Scales | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return the values [x, T, D] that `store` stored. If the static scales have no centre, it is missing from the values."""
        if scales is None:
            return decode(codes, self.static_scales(statistics), self.format, dtype)
        values_xTD = decode(codes, scales, self.format)
        if self.equalised:
            static = self.static_scales(statistics)
            values_xTD = values_xTD * static.step.float()
            if static.centre is not None:
                values_xTD = values_xTD + static.centre.float()
        return values_xTD.to(dtype)

    def static_scales(self, statistics: Range | Scales | None) -> Scales:
        """Return the scales [H, 1, D] that all tokens share."""
        if isinstance(statistics, Scales):
            return statistics
        if statistics is None:
            raise UserError(f"A static scale of {self.format.name} needs statistics: calibrate first.")
        return scales_of(statistics, self.format, symmetric=self.symmetric and not self.equalised)


def dequantised(values_xTD: Tensor, scheme: Scheme, statistics: Range | Scales | None = None) -> Tensor:
    """Return the values as a cache with this scheme returns them, in their dtype. The gradient is that of the identity."""
    return _StraightThrough.apply(values_xTD, scheme, statistics)


class _StraightThrough(torch.autograd.Function):
    """Return the decoded values to the bit. `values + (decoded - values).detach()` would round them again."""

    @staticmethod
    def forward(ctx, values_xTD, scheme, statistics):
        codes, scales = scheme.store(values_xTD, statistics)
        return scheme.restore(codes, scales, statistics, values_xTD.dtype)

    @staticmethod
    def backward(ctx, grad_xTD):
        return grad_xTD, None, None
