"""Quantise keys and values to 8 or 4 bits: formats, and the scales they share.

A stored number stands for centre + step * code. `Scales` come from the range of the values. `encode` turns values into codes and
`decode` turns codes back; a `Scheme` does both for keys and values. `encode` divides by the stored step, so rounding the step to
half precision adds no error. The functions know neither models nor caches.
"""

# x any leading dimensions, B rows, H kv heads, T tokens, D head dimension, d bytes of a token's codes in one head, G groups of
# channels

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


class Range(NamedTuple):
    """Lowest and highest value of every group of numbers that share a scale."""

    low: Tensor
    high: Tensor

    def union(self, other: "Range") -> "Range":
        """Return the range that covers both."""
        return Range(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))


@dataclass(frozen=True)
class Scales:
    """Stored scales. Each belongs to `channels` consecutive channels, or to all of them if there is only one per token."""

    step: Tensor
    centre: Tensor | None = None
    channels: int = 1

    def spread(self, scale: Tensor) -> Tensor:
        """Return the scale of every channel as float32, in a shape that broadcasts."""
        if self.channels > 1 and scale.shape[-1] > 1:
            scale = scale.repeat_interleave(self.channels, dim=-1)
        return scale.float()


# Ranges


def group_range(values_xD: Tensor, channels: int) -> Range:
    """Return the range [x, G] of each group of `channels` channels. The number of channels must divide D."""
    grouped = values_xD.detach().float().unflatten(-1, (-1, channels))
    return Range(grouped.amin(dim=-1), grouped.amax(dim=-1))


def channel_range(values_BHTD: Tensor) -> Range:
    """Return the range [H, 1, D] of each head and channel over all rows and tokens: a calibration statistic."""
    values_BHTD = values_BHTD.detach().float()
    return Range(values_BHTD.amin(dim=(0, 2))[:, None], values_BHTD.amax(dim=(0, 2))[:, None])


def scales_of(covered: Range, format: Format, *, symmetric: bool, channels: int = 1) -> Scales:
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
    return Scales(torch.where(step == 0, SMALLEST_STEP, step), centre, channels)


# Codes


def encode(values_xTD: Tensor, scales: Scales, format: Format) -> Tensor:
    """Return the codes: int8 [x, T, D], or packed 4-bit codes as uint8 [x, T, D/2]. Values beyond the range are clamped, halves
    are rounded to even."""
    centred = values_xTD.float()
    if scales.centre is not None:
        centred = centred - scales.spread(scales.centre)
    codes = (centred / scales.spread(scales.step)).clamp(format.low, format.high).round().to(torch.int8)
    return pack(codes) if format.bits == 4 else codes


def decode(codes: Tensor, scales: Scales, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [x, T, D] that the codes stand for."""
    numbers_xTD = (unpack(codes) if format.bits == 4 else codes).float()
    values_xTD = numbers_xTD * scales.spread(scales.step)
    if scales.centre is not None:
        values_xTD = values_xTD + scales.spread(scales.centre)
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


# Schemes


@dataclass(frozen=True)
class Scheme:
    """How keys or values are stored: the format, and which channels of a token share a symmetric scale."""

    format: Format
    channels: int | None = None
    """Channels that share a scale; None for all channels of a head."""
    equalised: bool = False
    """Shift and divide each channel by its static centre and step first. A scale of several channels then fits each of them."""

    def store(self, values_xTD: Tensor, static: Scales | None = None) -> tuple[Tensor, Scales]:
        """Return the codes and the scales to store with them. `static` are the scales [H, 1, D] that all tokens share."""
        if self.equalised:
            assert static is not None and static.centre is not None
            values_xTD = (values_xTD.float() - static.centre.float()) / static.step.float()
        channels = self.channels or values_xTD.shape[-1]
        scales = scales_of(group_range(values_xTD, channels), self.format, symmetric=True, channels=channels)
        return encode(values_xTD, scales, self.format), scales

    def restore(
        self, codes: Tensor, scales: Scales, static: Scales | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the values [x, T, D] that `store` stored. If the static scales have no centre, it is missing from the values."""
        values_xTD = decode(codes, scales, self.format)
        if self.equalised:
            assert static is not None
            values_xTD = values_xTD * static.step.float()
            if static.centre is not None:
                values_xTD = values_xTD + static.centre.float()
        return values_xTD.to(dtype)
