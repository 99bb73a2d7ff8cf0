"""Assign slots to the programs that read stored prompts, so that each prompt is read by few programs.

A program reads every prompt of its slots, which costs the same for one slot as for all. Samples of a prompt end one by one, so
programs over consecutive slots would read two prompts each.
"""

# S slots, R programs, M slots of a program

import torch
from torch import Tensor

from .jit import next_power_of_2

MEMBERS = 8
"""Maximum number of slots of a program over stored prompts. It reads each of their prompts once."""
PROMPT_ROWS = 64
"""Maximum number of queries of such a program. Registers hold their sums."""


def members_of(group: int) -> tuple[int, int]:
    """Return the padded number of query heads per kv head, and the slots of a program. A matrix product has 16 rows or more."""
    group_pad = next_power_of_2(group)
    return group_pad, max(1, 16 // group_pad, min(MEMBERS, PROMPT_ROWS // group_pad))


def readers_shape(slots: int, members: int) -> tuple[int, int]:
    """Return (programs, slots of a program). Twice as many programs as full groups would need leave room for groups with fewer
    slots."""
    return 2 * -(-slots // members), members


def prompt_readers(prompts_S: Tensor, members: int) -> Tensor:
    """Return the slots of each program [R, M], -1 for none. `prompts` identifies the prompt of each slot.

    A program has slots of one prompt. If there are too many prompts for that, programs have consecutive slots in the order of
    their prompts. The function does not wait for the device.
    """
    slots, device = len(prompts_S), prompts_S.device
    programs, _ = readers_shape(slots, members)
    sorted_S, order_S = prompts_S.sort(stable=True)
    index_S = torch.arange(slots, device=device)
    begins_S = torch.ones(slots, dtype=torch.bool, device=device)
    begins_S[1:] = sorted_S[1:] != sorted_S[:-1]
    rank_S = index_S - torch.where(begins_S, index_S, 0).cummax(0).values  # within the prompt
    program_S = (rank_S % members == 0).cumsum(0) - 1
    place_S = torch.where(program_S[-1] < programs, program_S * members + rank_S % members, index_S)
    readers = torch.full((programs * members,), -1, dtype=torch.int64, device=device)
    readers[place_S] = order_S
    return readers.view(programs, members)
