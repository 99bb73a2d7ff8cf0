"""Copy the positions that compactions dropped to the host while the device works, and record them after it has finished."""

# L layers, n sequences, H kv heads, N tokens dropped

import torch
from torch import Tensor

from ..kv.trace import TraceRecorder
from .scheduler import Sequence


class PendingDrops:
    def __init__(self) -> None:
        self.copies: list[tuple[list[tuple[TraceRecorder, int]], Tensor]] = []

    def add(self, sequences: list[Sequence], dropped_LnHN: Tensor) -> None:
        """Start to copy the dropped positions of the recorded sequences to the host."""
        recorded = [(index, each, each.trace) for index, each in enumerate(sequences) if each.trace is not None]
        if not recorded:
            return
        if len(recorded) < len(sequences):
            dropped_LnHN = torch.stack([dropped_LnHN[:, index] for index, _, _ in recorded], dim=1)
        if max(sequence.position for _, sequence, _ in recorded) <= torch.iinfo(torch.int16).max:
            dropped_LnHN = dropped_LnHN.short()
        self.copies.append(([(trace, sequence.entered) for _, sequence, trace in recorded], to_host_later(dropped_LnHN)))

    def record(self) -> None:
        """Record the positions. Call it after a synchronization with the device."""
        for recorders, pinned_LnHN in self.copies:
            dropped_LnHN = pinned_LnHN.clone()  # frees the pinned memory, which is slow to allocate, for reuse
            for index, (recorder, entered) in enumerate(recorders):
                recorder.record(entered, dropped_LnHN, index)
        self.copies.clear()


def to_host_later(tensor: Tensor) -> Tensor:
    """Start a copy to the host. The copy is complete after the next synchronization, at the latest at the end of the chunk."""
    return tensor.to("cpu", non_blocking=True)
