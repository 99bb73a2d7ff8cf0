"""Formats and scales of keys and values that the experiments compare. `kv/quantize.py` has the two that the package stores."""

# x any leading dimensions, B rows, H kv heads, T tokens, D head dimension, F rotary pairs

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_rl.kv.quantize import SCALE_DTYPE, Format, Range, Scales, decode, encode, group_range, scales_of

E4M3 = Format("e4m3", 8, -448, 448)


def widened(covered: Range, factor: float) -> Range:
    """Return the range with its width multiplied. Static scales then clamp fewer values outside the calibration data."""
    middle, half = (covered.low + covered.high) / 2, (covered.high - covered.low) / 2
    return Range(middle - factor * half, middle + factor * half)


def pair_range(keys_BHTD: Tensor) -> Range:
    """Return the range [H, 1, D] of each head and rotary pair of channels, (d, d + D/2), over all rows and tokens.

    It is plus and minus the largest length of the pair as a vector. Rotation keeps that length, so the range also covers keys
    at later positions than those of the calibration.
    """
    first, second = keys_BHTD.detach().float().chunk(2, dim=-1)
    length_H1F = torch.hypot(first, second).amax(dim=(0, 2))[:, None]
    high_H1D = torch.cat([length_H1F, length_H1F], dim=-1)
    return Range(-high_H1D, high_H1D)


@dataclass(frozen=True)
class Candidate:
    """How an experiment stores keys or values: the format, and which numbers share a scale."""

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

    def store(self, values_xTD: Tensor, statistics: Range) -> tuple[Tensor, Scales | None]:
        """Return the codes and the scales to store with them, None if all scales are static.

        `statistics` is a `channel_range` or `pair_range` of other values.
        """
        if self.tokens is None:
            return coded(values_xTD, self.static_scales(statistics), self.format), None
        if self.equalised:
            static = self.static_scales(statistics)
            assert static.centre is not None
            values_xTD = (values_xTD.float() - static.centre.float()) / static.step.float()
        channels = self.channels or values_xTD.shape[-1]
        covered = block_range(values_xTD, self.tokens, channels)
        scales = scales_of(covered, self.format, symmetric=self.symmetric, channels=channels)
        return coded(values_xTD, self.per_token(scales, values_xTD.shape[-2]), self.format), scales

    def restore(self, codes: Tensor, scales: Scales | None, statistics: Range, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [x, T, D] that `store` stored."""
        static = self.static_scales(statistics)
        if scales is None:
            return decode(codes, static, self.format, dtype)
        values_xTD = decode(codes, self.per_token(scales, codes.shape[-2]), self.format)
        if self.equalised:
            assert static.centre is not None
            values_xTD = values_xTD * static.step.float() + static.centre.float()
        return values_xTD.to(dtype)

    def static_scales(self, statistics: Range) -> Scales:
        """Return the scales [H, 1, D] that all tokens share."""
        return scales_of(statistics, self.format, symmetric=self.symmetric and not self.equalised)

    def per_token(self, scales: Scales, tokens: int) -> Scales:
        """Return the scales with one entry per token."""
        if self.tokens in (1, None):
            return scales
        step, centre = (
            None if each is None else each.repeat_interleave(self.tokens, dim=-2)[..., :tokens, :]
            for each in (scales.step, scales.centre)
        )
        return replace(scales, step=step, centre=centre)


def block_range(values_xTD: Tensor, tokens: int, channels: int) -> Range:
    """Return the range of each block of `tokens` tokens and each group of `channels` channels. The last block may be shorter."""
    if rest := -values_xTD.shape[-2] % tokens:  # repeat the last token, which changes no minimum or maximum
        values_xTD = torch.cat([values_xTD, *[values_xTD[..., -1:, :]] * rest], dim=-2)
    covered = group_range(values_xTD.unflatten(-2, (-1, tokens)), channels)
    return Range(covered.low.amin(dim=-2), covered.high.amax(dim=-2))


def coded(values_xTD: Tensor, scales: Scales, format: Format) -> Tensor:
    """Return the codes. Those of E4M3 are float8."""
    if format != E4M3:
        return encode(values_xTD, scales, format)
    assert scales.centre is None
    return (values_xTD.float() / scales.spread(scales.step)).clamp(format.low, format.high).to(torch.float8_e4m3fn)


def dequantised(values_xTD: Tensor, candidate: Candidate, statistics: Range) -> Tensor:
    """Return the values as a cache that stores this candidate returns them, in their dtype."""
    codes, scales = candidate.store(values_xTD, statistics)
    return candidate.restore(codes, scales, statistics, values_xTD.dtype)
