"""Rotary positions: which dimensions of a head rotate together, and by which angle per position.

A pair of dimensions is a complex number here. A rotation by an angle is a product with e^(i angle). `models/rotary.py` reads the
pairs and the frequencies from a model.
"""

# L layers, B rows, A and T any two dimensions (heads and tokens, for example), N packed tokens, Q query heads, F pairs of
# dimensions, D head dimension = 2 F

from dataclasses import dataclass

import torch
from torch import Tensor

ROTARY = ("rotary_pairs", "rotary_frequencies")
"""Names of a rotation's tensors among statistics."""


@dataclass(frozen=True)
class Rotary:
    """Rotation of the queries and keys of every layer. Every dimension of a head is in one pair."""

    pairs_LF2: Tensor
    """Dimensions of each pair: real part, imaginary part."""
    frequencies_LF: Tensor
    """Angle per position in radians, float64; 0 for dimensions that do not rotate."""

    @classmethod
    def half_split(cls, layers: int, head_dim: int, base: float = 10_000.0) -> "Rotary":
        """Return the common rotation: dimension f rotates with dimension f + D / 2, at frequency base^(-2f / D)."""
        pair_F = torch.arange(head_dim // 2)
        pairs_F2 = torch.stack([pair_F, pair_F + head_dim // 2], dim=-1)
        frequencies_F = base ** (-2 * pair_F.double() / head_dim)
        return cls(pairs_F2.expand(layers, -1, -1).contiguous(), frequencies_F.expand(layers, -1).contiguous())

    def statistics(self) -> dict[str, Tensor]:
        """Return the rotation as named tensors, as policies get it."""
        return dict(zip(ROTARY, (self.pairs_LF2.cpu(), self.frequencies_LF.cpu()), strict=True))

    def unrotated(self, layer: int, vectors_1AND: Tensor, positions_1N: Tensor) -> Tensor:
        """Return queries or keys [1, A, N, F] of a layer before rotation, as complex64."""
        pairs_1F2, frequencies_F = self.pairs_LF2[layer, None], self.frequencies_LF[layer]
        turn_NF = turns(-positions_1N[0, :, None].double() * frequencies_F.to(positions_1N.device))
        return to_pairs(vectors_1AND.float(), pairs_1F2.to(positions_1N.device)) * turn_NF


def turns(angles: Tensor) -> Tensor:
    """Return e^(i angle) as complex64. The angles are float64, because a position times a frequency may be large."""
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def to_pairs(vectors_BATD: Tensor, pairs_BF2: Tensor) -> Tensor:
    """Return the pairs [B, A, T, F] of float32 vectors as complex numbers."""
    real, imaginary = (vectors_BATD.gather(-1, _places(pairs_BF2, part, vectors_BATD)) for part in (0, 1))
    return torch.complex(real, imaginary)


def from_pairs(pairs_BATF: Tensor, pairs_BF2: Tensor) -> Tensor:
    """Return the vectors [B, A, T, D] of complex pairs."""
    real = pairs_BATF.real
    vectors_BATD = real.new_empty(*real.shape[:-1], 2 * real.shape[-1])
    vectors_BATD.scatter_(-1, _places(pairs_BF2, 0, real), real)
    return vectors_BATD.scatter_(-1, _places(pairs_BF2, 1, real), pairs_BATF.imag)


def _places(pairs_BF2: Tensor, part: int, like_BATx: Tensor) -> Tensor:
    return pairs_BF2[:, None, None, :, part].expand(*like_BATx.shape[:-1], -1)
