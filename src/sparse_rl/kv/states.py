"""States of recurrent layers: tensors of fixed size, one row per slot, allocated once.

A prefill writes the state after a prompt into the slots of all its samples and overwrites the states of earlier sequences.
A decode step updates the rows in place, so that a CUDA graph can capture it. Policies evict nothing from these layers.
"""

# S slots

import torch
from torch import Tensor

from ..format import counted
from .shape import CacheShape, refuse_too_large

States = dict[str, Tensor]
"""State tensors of one layer by name, with one row per sequence."""


class StateStore:
    def __init__(self, shape: CacheShape, slots: int):
        self.shape, self.device = shape, shape.device
        refuse_too_large(
            shape, slots * shape.state_bytes, f"The recurrent state of {counted(slots, 'slot')}", "use fewer slots"
        )
        self.of_layer: dict[int, States] = {}
        for state in shape.states:
            tensor = torch.zeros(slots, *state.size, dtype=state.dtype, device=shape.device)
            self.of_layer.setdefault(state.layer, {})[state.name] = tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for states in self.of_layer.values() for tensor in states.values()]

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def rows(self, layer: int, start: int, stop: int) -> States:
        """Return the states of these slots. Writing to them changes the slots."""
        return {name: tensor[start:stop] for name, tensor in self.of_layer[layer].items()}

    def write(self, layer: int, slots: Tensor, states: States, rows: Tensor) -> None:
        """Write the given rows of these states into slots."""
        for name, tensor in self.of_layer[layer].items():
            tensor[slots] = states[name][rows].to(tensor.dtype)

    def copy_slot(self, source: "StateStore", source_slot: int, slot: int) -> None:
        """Copy the states of a sequence from another slot, of this store or of another one."""
        for mine, theirs in zip(self.tensors, source.tensors, strict=True):
            mine[slot] = theirs[source_slot]
