"""Measure a model's rotary positions: run single tokens at several positions and compare queries and keys.

If a model uses positions only in rotary embeddings, a token that attends only to itself has the same hidden states at every
position. Its queries and keys then differ only by the rotation. This reads any pairing (half-split, interleaved, partial) and
any frequencies (scaled, different in some layers), without knowing the model's code. The passes run a float32 stand-in with one
layer of each kind (`reduced.py`).
"""

# L layers, P positions, M vectors (queries and keys of all heads and tokens), D head dimension, F = D / 2 pairs, N tokens

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UserError, first_line
from ..kernels.form import PLAIN
from ..kv.rotary import Rotary
from .attention import attend_to_itself, eval_mode
from .head import decoder_output
from .recurrent import Mixer
from .reduced import ROWS, reduced, stand_ins
from .support import prepare

TOKENS = 16
"""Different tokens whose queries and keys are compared."""
LAST = 2**22
"""Largest position. float32 still holds it exactly, and the lowest frequencies in use rotate visibly by then."""
MOVED = 1e-3
"""Relative change above which a dimension counts as rotating. Rounding changes it by 1e-6."""
MISFIT = 1e-2
"""Largest part of a pair that its rotation may leave unexplained, relative to its smaller dimension."""

_known: WeakKeyDictionary[PreTrainedModel, Rotary] = WeakKeyDictionary()


def rotary_of(model: PreTrainedModel, policy: str) -> Rotary:
    """Return the rotation of the model's queries and keys. Raise UserError that names the policy if there is none."""
    if model not in _known:
        remedy = f"so kv.policy = {policy} cannot predict its queries: set kv.policy = streaming or rkv"
        try:
            of_kind = {layer: _read(vectors_PMD, places) for layer, (vectors_PMD, places) in _probe(model).items()}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = first_line(error)
            raise UserError(f"The rotary positions of {type(model).__name__} cannot be read ({reason}), {remedy}.") from error
        if not any(bool(frequencies_F.any()) for _, frequencies_F in of_kind.values()):
            raise UserError(f"{type(model).__name__} has no rotary positions, {remedy}.")
        size = prepare(model).shape.head_dim // 2
        of_kind = {kind: found for kind, found in of_kind.items() if len(found[1]) == size}
        any_kind = next(iter(of_kind.values()))  # for layers that hold no such keys, whose entry is not used
        pairs, frequencies = zip(*(of_kind.get(kind, any_kind) for kind in stand_ins(model)), strict=True)
        _known[model] = Rotary(torch.stack(pairs), torch.stack(frequencies))
    return _known[model]


@torch.no_grad()
def _probe(model: PreTrainedModel) -> dict[int, tuple[Tensor, list[int]]]:
    """Return the vectors [P, M, D] of each layer of the stand-in with attention, and their positions: 0, 1, 2, 4, 8, …"""
    small = reduced(model)
    limits = prepare(small)
    longest = limits.positions or LAST
    places = [0] + [2**power for power in range(LAST.bit_length()) if 2**power < longest]
    rows = min(limits.vocab, ROWS)
    tokens_N = torch.arange(min(rows, TOKENS), device=small.device) * (rows // min(rows, TOKENS))
    positions_PN = torch.tensor(places, device=small.device)[:, None].expand(-1, len(tokens_N))
    view = _Recording()
    with eval_mode(small):
        decoder_output(small, tokens_N.expand(len(places), -1), positions_PN, view)
    return {layer: (vectors_PMD, places) for layer, vectors_PMD in view.vectors.items()}


class _Recording:
    """View of tokens that attend only to themselves, which keeps the queries and keys of each layer."""

    def __init__(self) -> None:
        self.vectors: dict[int, Tensor] = {}

    def attend(self, layer, queries_PQND, keys_PHND, values_PHND, scale, mask, form=PLAIN):
        both = [each.double().cpu().flatten(1, 2) for each in (queries_PQND, keys_PHND)]
        both = [each / torch.linalg.matrix_norm(each, keepdim=True) for each in both]  # some models scale queries by position
        self.vectors[layer] = torch.cat(both, dim=1)
        return attend_to_itself(queries_PQND, values_PHND)

    def recur(self, layer: int, mixer: Mixer, hidden_PND: Tensor) -> Tensor:
        return mixer(hidden_PND)  # mixes tokens alike at every position


def _read(vectors_PMD: Tensor, places: list[int]) -> tuple[Tensor, Tensor]:
    """Return the pairs [F, 2] and the frequencies [F] of one layer. Raise a ValueError if the vectors do not rotate."""
    energy_PD = vectors_PMD.square().sum(dim=1)
    moved_D = (vectors_PMD - vectors_PMD[:1]).square().sum(dim=1).amax(dim=0) / energy_PD[0]
    rotates_D = moved_D > MOVED**2
    # For dimensions i and j, the sum of z_p conj(z_0) over all vectors, with z = x_i + i x_j. Its angle is that of the rotation.
    products_PDD = vectors_PMD.transpose(1, 2) @ vectors_PMD[0]
    same_PD = products_PDD.diagonal(dim1=1, dim2=2)
    sums_PDD = torch.complex(same_PD[:, :, None] + same_PD[:, None], products_PDD.transpose(1, 2) - products_PDD)
    total_PDD = energy_PD[:, :, None] + energy_PD[:, None] + energy_PD[0, :, None] + energy_PD[0]
    rest_DD = (total_PDD - 2 * sums_PDD.abs()).amax(dim=0) / (2 * torch.minimum(energy_PD[0, :, None], energy_PD[0]))
    possible_DD = rotates_D[:, None] & rotates_D & ~torch.eye(len(rotates_D), dtype=torch.bool)
    best_D = rest_DD.masked_fill(~possible_DD, torch.inf).min(dim=1)
    pairs, frequencies = [], []
    for first in torch.nonzero(rotates_D).flatten().tolist():
        second = int(best_D.indices[first])
        if int(best_D.indices[second]) != first or not float(best_D.values[first]) < MISFIT**2:
            raise ValueError("queries and keys change with the position, but not by a rotation")
        if first < second:
            frequency = _frequency(sums_PDD[:, first, second].angle().tolist(), places)
            pairs.append((first, second) if frequency >= 0 else (second, first))
            frequencies.append(abs(frequency))
    still = torch.nonzero(~rotates_D).flatten().tolist()
    if len(still) % 2:
        raise ValueError("the head dimension is odd")
    half = len(still) // 2
    pairs += zip(still[:half], still[half:], strict=True)
    return torch.tensor(pairs), torch.tensor(frequencies + [0.0] * half, dtype=torch.float64)


def _frequency(angles: list[float], places: list[int]) -> float:
    """Return the angle per position from the angles, modulo 2π, at positions that double."""
    frequency = 0.0
    for angle, place in zip(angles[1:], places[1:], strict=True):
        frequency += math.remainder(angle - place * frequency, 2 * math.pi) / place
    return frequency
