"""Layout of prefilled prompts: the slots of their samples, and the index of each token in its slot."""

# P prompts, m prompts with an n-th sample, M copied tokens

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NthSamples:
    """The n-th samples of several prompts, and the slots that they enter."""

    rows_m: Tensor
    """Indices of the prompts, out of P, that have an n-th sample."""
    slots_m: Tensor
    seeds_P: Tensor
    """Seed of each prompt's n-th sample. A prompt with fewer samples uses the seed of its last sample."""


def nth_samples(slots: list[list[int]], seeds: list[list[int]], device: torch.device) -> list[NthSamples]:
    """Group the slots and seeds by sample number: all first samples, all second samples, and so on."""
    found = []
    for number in range(max(map(len, slots))):
        rows = [row for row, of_prompt in enumerate(slots) if len(of_prompt) > number]
        found.append(
            NthSamples(
                torch.tensor(rows, device=device),
                torch.tensor([slots[row][number] for row in rows], device=device),
                torch.tensor([of_prompt[min(number, len(of_prompt) - 1)] for of_prompt in seeds], device=device),
            )
        )
    return found


@dataclass(frozen=True)
class PackedPrompts:
    """One sample of each prompt that fits its slot: source index, slot and index within the slot of every copied token."""

    source_M: Tensor
    slots_M: Tensor
    places_M: Tensor
    recent: tuple[Tensor, Tensor, Tensor]
    """Source index, slot and index within the ring buffer of the queries that enter it: the last ones of each prompt."""
    lengths: list[tuple[int, int]]
    """(slot, number of tokens) of each sample."""

    @classmethod
    def of(cls, copies: list[tuple[int, int, int]], ring: int, device: torch.device) -> "PackedPrompts":
        """Build from (start among the packed tokens, number of tokens, slot) of each sample."""
        starts, counts, slots = (torch.tensor(each, device=device) for each in zip(*copies, strict=True))
        total = sum(tokens for _, tokens, _ in copies)
        which_M = torch.repeat_interleave(torch.arange(len(copies), device=device), counts, output_size=total)
        places_M = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[which_M]
        recent_m = torch.nonzero(places_M >= counts[which_M] - ring).flatten()
        source_M, slots_M = starts[which_M] + places_M, slots[which_M]
        recent = (source_M[recent_m], slots_M[recent_m], places_M[recent_m] % max(1, ring))
        return cls(source_M, slots_M, places_M, recent, [(slot, tokens) for _, tokens, slot in copies])
