"""Choose the number of concurrent rollouts of an evaluation: by free memory on a GPU, 64 on a CPU."""

from ..config import KV
from ..gpu_memory import free_bytes
from ..plan.memory import largest
from ..rollout.engine import Engine
from ..sizes import MAX_AUTO_SLOTS, STEP_LOGIT_BYTES, slot_bytes, store_bytes

CPU_SLOTS = 64
SHARE = 0.8
"""Share of the free memory used for keys, values and logits. Side tables, prefill, graphs and replays use the rest."""


def auto_slots(probe: Engine, kv: KV, longest: int, prompt_lengths: list[int], samples: int) -> int:
    """Return the number of slots for sequences of at most `longest` tokens. `probe` is any engine of the same model.

    `samples` responses to each prompt are sampled. The lengths of the prompts matter if a prompt store holds them.
    """
    shape = probe.limits.shape
    if shape.device.type != "cuda":
        return CPU_SLOTS
    room, size = int(SHARE * free_bytes(shape.device)), shape.dtype.itemsize
    of_slot = slot_bytes(shape, kv, longest, size)[0] + probe.limits.vocab * STEP_LOGIT_BYTES

    def fit(slots: int) -> bool:
        stored = store_bytes(shape, prompt_lengths, slots, samples, size, kv.dtype)[0] if kv.stores_prompts else 0
        return slots * of_slot + stored <= room

    return max(1, largest(fit, MAX_AUTO_SLOTS))
