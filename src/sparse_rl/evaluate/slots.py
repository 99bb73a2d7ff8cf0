"""Choose the number of concurrent rollouts of an evaluation: by free memory on a GPU, 64 on a CPU."""

from ..config import KV
from ..gpu_memory import free_bytes
from ..rollout.engine import Engine
from ..sizes import MAX_AUTO_SLOTS, STEP_LOGIT_BYTES, slot_bytes

CPU_SLOTS = 64
SHARE = 0.8
"""Share of the free memory used for keys, values and logits. Side tables, prefill, graphs and replays use the rest."""


def auto_slots(probe: Engine, kv: KV, longest: int) -> int:
    """Return the number of slots for sequences of at most `longest` tokens. `probe` is any engine of the same model."""
    shape = probe.limits.shape
    if shape.device.type != "cuda":
        return CPU_SLOTS
    keys, _ = slot_bytes(shape, kv, longest, shape.dtype.itemsize)
    needed = keys + probe.limits.vocab * STEP_LOGIT_BYTES
    return min(MAX_AUTO_SLOTS, max(1, int(SHARE * free_bytes(shape.device)) // needed))
