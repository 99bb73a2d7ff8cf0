"""How many rollouts an evaluation runs at a time: on a GPU what its free memory holds, on a CPU a handful."""

import torch

from ..config import KV
from ..rollout.engine import CHUNK, Engine

CPU_SLOTS = 64
MAX_SLOTS = 1024
"""Matrix products are at full speed long before, and the host's work grows on."""
SHARE = 0.8
"""Of what is free goes into the cache and its steps; prefill, graphs and replays have the rest."""
STEP_BYTES = 4
"""Of a logit of a decode step."""


def auto_slots(probe: Engine, kv: KV, longest: int) -> int:
    """For sequences of at most `longest` tokens; `probe` is any engine on the model."""
    shape = probe.limits.shape
    if shape.device.type != "cuda":
        return CPU_SLOTS
    capacity = kv.capacity if kv.policy != "full" else longest + CHUNK["cuda"]
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    slot_bytes = capacity * token_bytes + probe.limits.vocab * STEP_BYTES
    return min(MAX_SLOTS, max(1, int(SHARE * free_bytes(shape.device)) // slot_bytes))


def free_bytes(device: torch.device) -> int:
    """What torch may still take, what it holds without use included."""
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free + held, allowed) - used)
