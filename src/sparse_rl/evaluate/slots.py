"""Choose how many rollouts an evaluation runs at a time: on a GPU by its free memory, on a CPU a handful."""

import torch

from ..config import KV
from ..rollout.engine import CHUNK, Engine

CPU_SLOTS = 64
MAX_SLOTS = 1024
"""Upper limit of slots. Matrix products reach full speed long before it, while the host's work keeps growing."""
SHARE = 0.8
"""Share of the free memory for the cache and its decode steps; prefill, graphs and replays use the rest."""
STEP_BYTES = 4
"""Bytes of one logit in a decode step."""


def auto_slots(probe: Engine, kv: KV, longest: int) -> int:
    """Return the slots for sequences of at most `longest` tokens; `probe` is any engine on the model."""
    shape = probe.limits.shape
    if shape.device.type != "cuda":
        return CPU_SLOTS
    capacity = kv.capacity if kv.policy != "full" else longest + CHUNK["cuda"]
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    slot_bytes = capacity * token_bytes + probe.limits.vocab * STEP_BYTES
    return min(MAX_SLOTS, max(1, int(SHARE * free_bytes(shape.device)) // slot_bytes))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that torch may still allocate, including reserved memory that is not in use."""
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free + held, allowed) - used)
