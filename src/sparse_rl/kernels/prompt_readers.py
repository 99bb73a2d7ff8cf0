"""Assign slots to the programs that read stored prompts, so that each prompt is read by few programs.

A program reads every prompt of its slots, which costs the same for one slot as for all. Samples of a prompt end one by one, so
programs over consecutive slots would read two prompts each.
"""

# S slots, P pages of the longest prompt, A programs, M slots of a program

import torch
from torch import Tensor

from .jit import next_power_of_2

MEMBERS = 8
"""Maximum number of slots of a program, or 16 if each query head has its own keys."""
PROMPT_ROWS = 64
"""Maximum number of queries of such a program. Registers hold their sums."""


def members_of(group: int) -> int:
    """Return the slots of a program, for a number of query heads per kv head. A matrix product has 16 rows or more."""
    group_pad = next_power_of_2(group)
    return max(1, 16 // group_pad, min(MEMBERS, PROMPT_ROWS // group_pad))


def programs_of(slots: int, members: int) -> int:
    """Return the number of programs: twice as many as full groups need, because groups that have lost samples need more."""
    return 2 * -(-slots // members)


def prompt_readers(pages_SP: Tensor, lengths_S: Tensor, members: int) -> Tensor:
    """Return the slots of each program [A, M], -1 for none. `pages` and `lengths` are those of the slots' prompts. A prompt is
    known by its first page. Slots without a prompt, whose pages may belong to another by now, are together.

    A program has slots of one prompt. If there are too many prompts for that, programs have consecutive slots in the order of
    their prompts. The function does not wait for the device.
    """
    slots, device = len(pages_SP), pages_SP.device
    programs = programs_of(slots, members)
    sorted_S, order_S = torch.where(lengths_S > 0, pages_SP[:, 0], -1).sort(stable=True)
    index_S = torch.arange(slots, device=device)
    begins_S = torch.ones(slots, dtype=torch.bool, device=device)
    begins_S[1:] = sorted_S[1:] != sorted_S[:-1]
    rank_S = index_S - torch.where(begins_S, index_S, 0).cummax(0).values  # within the prompt
    program_S = (rank_S % members == 0).cumsum(0) - 1
    place_S = torch.where(program_S[-1] < programs, program_S * members + rank_S % members, index_S)
    readers = torch.full((programs * members,), -1, dtype=torch.int64, device=device)
    readers[place_S] = order_S
    return readers.view(programs, members)
