"""References to rows of the cache and to prompts of the prompt store. Kernels read them in place; all other code uses a copy."""

# In rows of the cache: N cached rows, R referenced rows, H kv heads, C capacity, T tokens held, D head dimension.
# In stored prompts: S slots, N pages of the pool, H kv heads, T tokens of a page, D head dimension, P pages of the longest
# prompt, t gathered tokens, A programs over prompts, M slots of a program.
# Kernels over rows and stored prompts use the same letters.

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


def gathered_prompts(stored_NHTD: Tensor, pages_SP: Tensor, tokens: int) -> Tensor:
    """Return a copy of the first `tokens` tokens in each row's pages, as [S, H, tokens, D]."""
    heads, page, dim = stored_NHTD.shape[1:]
    token = torch.arange(tokens, device=pages_SP.device)
    head_H1 = torch.arange(heads, device=pages_SP.device)[:, None]
    index_SHt = (pages_SP.long()[:, token // page][:, None] * heads + head_H1) * page + token % page
    return stored_NHTD.flatten(0, 2).index_select(0, index_SHt.flatten()).view(len(pages_SP), heads, tokens, dim)
