"""Choose the concurrent rollouts of an evaluation and the bytes of a dense cache: by free memory on a GPU, 64 on a CPU."""

from ..config import KV
from ..gpu_memory import free_bytes
from ..plan.memory import largest
from ..rollout.engine import Engine
from ..sizes import (
    MAX_AUTO_SLOTS,
    STEP_LOGIT_BYTES,
    dense_bytes,
    dense_pages,
    live_dense_pages,
    slot_bytes,
    store_bytes,
    window_bytes,
)

CPU_SLOTS = 64
SHARE = 0.8
"""Share of the free memory used for keys, values and logits. Side tables, prefill, graphs and replays use the rest."""


def auto_slots(probe: Engine, kv: KV, max_tokens: int, prompt_lengths: list[int], samples: int) -> int:
    """Return the number of slots for responses of at most `max_tokens` tokens. `probe` is any engine of the same model.

    `samples` responses to each prompt are sampled. A dense cache must hold the live tokens of its slots.
    """
    whole, shape = probe.limits.shape, probe.limits.shape.full
    if shape.device.type != "cuda":
        return CPU_SLOTS
    room, size = int(SHARE * free_bytes(shape.device)), shape.dtype.itemsize
    bytes_per_slot = slot_bytes(shape, kv, size)[0] + probe.limits.vocab * STEP_LOGIT_BYTES
    bytes_per_slot += window_bytes(whole, max(prompt_lengths) + max_tokens, size) + whole.state_bytes

    def fit(slots: int) -> bool:
        stored = store_bytes(shape, prompt_lengths, slots, samples, size, kv.dtype)[0] if kv.stores_prompts else 0
        if kv.policy == "full":
            pages = live_dense_pages(max(prompt_lengths), max_tokens, slots, samples)
            stored = dense_bytes(shape, 0, pages, size, kv.dtype)
        return slots * bytes_per_slot + stored <= room

    return max(1, largest(fit, MAX_AUTO_SLOTS))


def dense_cache_bytes(engine: Engine, max_tokens: int, prompt_lengths: list[int], samples: int) -> int | None:
    """Return the bytes of keys and values of a dense engine: those with which no sequence waits, or as many as are free.

    None on a CPU, where the cache grows as needed.
    """
    shape = engine.limits.shape.full
    if shape.device.type != "cuda":
        return None
    whole, size = engine.limits.shape, shape.dtype.itemsize
    fixed = engine.slots * (window_bytes(whole, max(prompt_lengths) + max_tokens, size) + whole.state_bytes)
    logits = engine.slots * engine.limits.vocab * STEP_LOGIT_BYTES
    room = int(SHARE * free_bytes(shape.device)) - logits + engine.cache.kv_bytes  # its slots are allocated
    wanted = dense_pages(prompt_lengths, max_tokens, engine.slots, samples)
    return min(room, dense_bytes(shape, engine.slots, wanted, size, engine.kv.dtype) + fixed)
