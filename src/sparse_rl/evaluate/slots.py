"""Choose how many rollouts an evaluation runs at a time: on a GPU by its free memory, on a CPU a handful."""

from ..config import KV
from ..gpu_memory import free_bytes
from ..rollout.engine import Engine
from ..sizes import MAX_AUTO_SLOTS, STEP_LOGIT_BYTES, slot_bytes

CPU_SLOTS = 64
SHARE = 0.8
"""Share of the free memory for keys, values and logits; side tables, prefill, graphs and replays use the rest."""


def auto_slots(probe: Engine, kv: KV, longest: int) -> int:
    """Return the slots for sequences of at most `longest` tokens; `probe` is any engine on the model."""
    shape = probe.limits.shape
    if shape.device.type != "cuda":
        return CPU_SLOTS
    keys, _ = slot_bytes(shape, kv, longest, shape.dtype.itemsize)
    needed = keys + probe.limits.vocab * STEP_LOGIT_BYTES
    return min(MAX_AUTO_SLOTS, max(1, int(SHARE * free_bytes(shape.device)) // needed))
