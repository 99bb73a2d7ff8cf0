"""References to rows of the cache and to prompts of the prompt store. Kernels read them in place; all other code uses a copy."""

# N cached rows, R referenced rows, H kv heads, C capacity, T tokens held, D head dimension; in stored prompts: S slots, N
# pages of the pool, T tokens of a page, P pages of the longest prompt, A programs over prompts, M slots of a program

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The first `held` tokens of selected rows, with shape [R, H, T, D]."""

    stored_NHCD: Tensor
    rows_R: Tensor
    held: int

    @classmethod
    def of(cls, tensor_RHTD: Tensor) -> "Rows":
        """Return a reference to all rows of a tensor."""
        stored = tensor_RHTD if tensor_RHTD.stride(-1) == 1 else tensor_RHTD.contiguous()
        return cls(stored, torch.arange(len(stored), device=stored.device), stored.shape[2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.rows_R), self.stored_NHCD.shape[1], self.held, self.stored_NHCD.shape[3]

    @property
    def device(self) -> torch.device:
        return self.stored_NHCD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.stored_NHCD.dtype

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides of row, head and token."""
        return self.stored_NHCD.stride()[:3]  # type: ignore[return-value]

    def take(self) -> Tensor:
        """Return a copy of the referenced rows."""
        return self.stored_NHCD[self.rows_R, :, : self.held]


@dataclass(frozen=True)
class StoredPrompts:
    """Prompts of the slots, or all but the newest tokens of dense sequences, in one layer of the prompt store."""

    keys_NHTD: Tensor
    values_NHTD: Tensor
    pages_SP: Tensor
    """Pages of each slot, int32."""
    lengths_S: Tensor
    """Tokens in the pages of each slot."""
    readers_AM: Tensor | None = None
    """Slots of each program that reads prompts (`prompt_readers`); None if every slot reads its own."""


@dataclass(frozen=True)
class StoredCodes:
    """Pages of the slots in one layer of a prompt store of 8-bit or 4-bit codes."""

    stored: tuple[Tensor, Tensor, Tensor, Tensor]
    """Codes of keys and values [N, H, T, bytes], and the steps of both [N, H, T, steps]."""
    pages_SP: Tensor
    """Pages of each slot, int32."""
    lengths_S: Tensor
    """Tokens in the pages of each slot."""
    readers_AM: Tensor | None = None
    """Slots of each program that reads prompts, as in `StoredPrompts`."""
