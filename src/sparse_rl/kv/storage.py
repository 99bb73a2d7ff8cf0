"""Storage of cached keys and values: numbers in the model's dtype, or 8-bit or 4-bit codes with their steps.

A quantised key stands for centre + channel step * token step * code. Centre and channel step are static: `KeyScales` holds them
for each layer, head and channel. The token step is one number per token and head in 8 bits, and one per group of channels in 4
bits. Values have no static scales. The codes of a token do not depend on other tokens, so compaction moves them unchanged.

The centre adds the same number to all logits of a query, so it drops out of every softmax. Attention therefore reads keys without
their centre, which are smaller and lose less to rounding. With soft caps or learned sinks, which depend on the logits themselves,
attention reads keys with their centre. So do policies: norms, cosines and maxima over query heads depend on the centre.
"""

# L layers, H kv heads, T tokens, D head dimension, G groups of channels, x any leading dimensions

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels.decode_codes import fused_decode
from ..kernels.jit import usable
from ..kernels.rows import Rows
from ..sizes import codes_problem, group_channels
from .quantize import INT4, INT8, SCALE_DTYPE, Range, Scales, Scheme, scales_of
from .shape import CacheShape


class Stored(NamedTuple):
    """Keys and values as a cache stores them. Without codes, the steps are empty tensors [x, T, 0]."""

    keys: Tensor
    values: Tensor
    key_steps: Tensor
    value_steps: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Stored":
        return Stored(*map(function, self))

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self)


NARROWEST = 32
"""Largest ratio of a head's median step to its smallest. Without this limit, a channel that hardly varied in a short calibration
would determine the step of every token."""


class KeyScales(NamedTuple):
    """Static scales of the keys of a model, float16 [L, H, D]."""

    centre_LHD: Tensor
    step_LHD: Tensor

    @classmethod
    def of(cls, ranges: list[Range]) -> "KeyScales":
        """Return the scales of the key ranges [H, 1, D] of each layer."""
        layers = [scales_of(each, INT8, symmetric=False) for each in ranges]
        centres = [scales.centre for scales in layers if scales.centre is not None]
        step_LHD = torch.stack([scales.step for scales in layers]).squeeze(2)
        least_LH1 = step_LHD.float().median(dim=-1, keepdim=True).values / NARROWEST
        return cls(torch.stack(centres).squeeze(2), step_LHD.maximum(least_LH1.to(step_LHD.dtype)))

    @classmethod
    def unset(cls, layers: int, heads: int, dim: int, device: torch.device) -> "KeyScales":
        """Return centres of 0 and steps of 1."""
        step_LHD = torch.ones(layers, heads, dim, dtype=SCALE_DTYPE, device=device)
        return cls(torch.zeros_like(step_LHD), step_LHD)


KEYS, VALUES, KEY_STEPS, VALUE_STEPS = range(4)
"""Indices of the tensors of `Stored`."""


@dataclass(frozen=True, eq=False)
class Quantiser:
    """Storage in 8 or 4 bits. `dtype` is `kv.dtype`."""

    dtype: str
    scales: KeyScales
    with_centre: bool = False
    """True if attention reads keys with their centre, which soft caps and learned sinks need."""

    def __post_init__(self) -> None:
        if problem := codes_problem(self.scales.step_LHD.shape[-1], self.dtype):
            raise UserError(problem)

    @property
    def schemes(self) -> tuple[Scheme, Scheme]:
        """Schemes of keys and values."""
        if self.dtype == "8bit":
            return Scheme(INT8, equalised=True), Scheme(INT8)
        channels = group_channels(self.scales.step_LHD.shape[-1])
        return Scheme(INT4, channels=channels, equalised=True), Scheme(INT4, channels=channels)

    def to(self, device: torch.device) -> "Quantiser":
        """Return a copy of the scales on the device, or the quantiser itself if they are there."""
        if self.scales.step_LHD.device == device:
            return self
        return replace(self, scales=KeyScales(*(each.to(device) for each in self.scales)))

    def layout(self) -> tuple[torch.dtype, int, int]:
        """Return the dtype of codes, and the numbers of codes and steps of a token and head."""
        dim = self.scales.step_LHD.shape[-1]
        return (torch.int8, dim, 1) if self.dtype == "8bit" else (torch.uint8, dim // 2, dim // group_channels(dim))

    def static(self, layer: int | Tensor, *, centre: bool) -> Scales:
        """Return the static scales of the keys of a layer, or of each row's layer."""
        centre_xHD, step_xHD = (each[layer].unsqueeze(-2) for each in self.scales)
        return Scales(step_xHD, centre_xHD if centre else None)

    def encode(self, layer: int, keys_xHTD: Tensor, values_xHTD: Tensor) -> Stored:
        key_scheme, value_scheme = self.schemes
        key_codes, key_scales = key_scheme.store(keys_xHTD, self.static(layer, centre=True))
        value_codes, value_scales = value_scheme.store(values_xHTD)
        return Stored(key_codes, value_codes, key_scales.step, value_scales.step)

    def decode_keys(
        self, layer: int | Tensor, codes: Tensor | Rows, steps: Tensor | Rows, dtype: torch.dtype, *, centre: bool = True
    ) -> Tensor:
        """Return the keys [x, H, T, D], with or without their centre. `layer` is a tensor if rows are of several layers."""
        if usable(codes.device):
            centre_xHD, step_xHD = (each[layer] for each in self.scales)
            return fused_decode(codes, steps, step_xHD, centre_xHD if centre else None, dtype)
        assert isinstance(codes, Tensor) and isinstance(steps, Tensor)
        return self.schemes[0].restore(codes, self._of_token(steps), self.static(layer, centre=centre), dtype)

    def decode_values(self, codes: Tensor | Rows, steps: Tensor | Rows, dtype: torch.dtype) -> Tensor:
        if usable(codes.device):
            return fused_decode(codes, steps, None, None, dtype)
        assert isinstance(codes, Tensor) and isinstance(steps, Tensor)
        return self.schemes[1].restore(codes, self._of_token(steps), None, dtype)

    def decode(self, layer: int, stored: Stored, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values that attention reads. Keys include their centre if `with_centre` is set."""
        keys_xHTD = self.decode_keys(layer, stored.keys, stored.key_steps, dtype, centre=self.with_centre)
        return keys_xHTD, self.decode_values(stored.values, stored.value_steps, dtype)

    def restored(self, layer: int, keys_xHTD: Tensor, values_xHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as attention reads them from a cache. The gradient is that of the identity."""
        return _Restored.apply(keys_xHTD, values_xHTD, self, layer)

    def _of_token(self, steps: Tensor) -> Scales:
        dim = self.scales.step_LHD.shape[-1]
        return Scales(steps, None, dim // steps.shape[-1])


def same_storage(left: Quantiser | None, right: Quantiser | None) -> bool:
    """Return whether both store keys and values in the same way."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and all(torch.equal(a, b) for a, b in zip(left.scales, right.scales, strict=True))


class _Restored(torch.autograd.Function):
    """Return the decoded values to the bit. `values + (decoded - values).detach()` would round them again."""

    @staticmethod
    def forward(ctx, keys_xHTD, values_xHTD, quantiser, layer):
        return quantiser.decode(layer, quantiser.encode(layer, keys_xHTD, values_xHTD), keys_xHTD.dtype)

    @staticmethod
    def backward(ctx, grad_keys, grad_values):
        return grad_keys, grad_values, None, None


def allocated(rows: tuple[int, ...], shape: CacheShape, quantiser: Quantiser | None) -> Stored:
    """Return storage of zeros for tokens with these leading dimensions. A masked key has weight 0, and 0 times an
    uninitialized NaN would be NaN."""
    dtype, width, steps = (shape.dtype, shape.head_dim, 0) if quantiser is None else quantiser.layout()
    sizes = ((width, dtype), (width, dtype), (steps, SCALE_DTYPE), (steps, SCALE_DTYPE))
    return Stored(*(torch.zeros(*rows, size, dtype=dtype, device=shape.device) for size, dtype in sizes))


def encoded(quantiser: Quantiser | None, layer: int, keys_xHTD: Tensor, values_xHTD: Tensor) -> Stored:
    """Return new keys and values in the form in which they are stored."""
    if quantiser is not None:
        return quantiser.encode(layer, keys_xHTD, values_xHTD)
    no_steps = keys_xHTD.new_empty((*keys_xHTD.shape[:-1], 0), dtype=SCALE_DTYPE)
    return Stored(keys_xHTD, values_xHTD, no_steps, no_steps)
