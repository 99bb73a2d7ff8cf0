"""Sizes that decide memory: chunks, tiles, scratch and the bytes of a slot. Imports no torch.

The code that allocates and `sparse-rl plan`, which predicts the allocation, read the same values here.
"""

from typing import Protocol

from .config import KV

# The learner

CHUNK_ELEMENTS = 2**26
"""Maximum logits in a chunk: 256 MiB in float32, and about four times that with the tensors computed from them."""
FUSED_CHUNK_ELEMENTS = 2**28
"""Maximum logits in a chunk that is one kernel, with logits in half precision: 512 MiB, and as much again for their
gradient. Larger chunks write the head's gradient less often."""
LARGE_VOCABULARY = 16384
"""Vocabulary size below which a chunk is cheap and not worth a compilation."""
SHADOW_BLOCK = 128
"""Tokens of a block of FlexAttention in a shadow pass."""


def padded_length(tokens: int) -> int:
    """Return the tokens to which a shadow pass pads: the next power of two, at least one block."""
    return max(SHADOW_BLOCK, 1 << (tokens - 1).bit_length())


# The sampler

PREFILL_TOKENS = 8192
"""Maximum prompt tokens per forward pass."""
CHUNK_STEPS = {"cpu": 8, "cuda": 16}
"""Maximum decode steps between two returns to the host, by device type. The engine takes a divisor of the interval. A
finished slot idles until the next return, so a dense slot has room for so many more tokens."""
FIRST_TOKENS = 64
"""Rows of logits sampled at a time after prefill. This bounds the memory of torch's float64 sums."""
STEP_LOGIT_BYTES = 4
"""Bytes per logit of a decode step: the logit, and the state of the sampling kernel."""
MAX_AUTO_SLOTS = 1024
"""Upper limit of an automatic number of slots. Matrix products reach full speed long before it; the host's work keeps
growing."""
SCRATCH_SHARE = 0.05
"""Share of the cache for the temporaries of a compaction."""
SCRATCH_FLOOR_BYTES = 16 * 2**20
"""Minimum of that scratch, so that a cache of a few MiB is not compacted row by row."""
QUERY_POLICIES = ("rkv", "snapkv", "tova")
"""Built-in policies that keep a ring of queries: those with `uses_queries`."""


class AttentionShape(Protocol):
    """Heads of a model: its `CacheShape`, or the plan's `Dimensions`."""

    @property
    def layers(self) -> int: ...
    @property
    def q_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def token_bytes(shape: AttentionShape, itemsize: int) -> int:
    """Return the bytes of the keys and values of one cached token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize


def slot_bytes(shape: AttentionShape, kv: KV, longest: int, itemsize: int) -> tuple[int, int]:
    """Return (bytes of keys and values, bytes of side tables) of one slot on a GPU, as `SlotCache` allocates them.

    `longest` is the tokens of the longest sequence, which a dense slot must hold. A user's own policy counts as one that
    keeps queries.
    """
    dense = kv.policy == "full"
    capacity = longest + CHUNK_STEPS["cuda"] if dense else kv.capacity
    ring = 0 if dense or (kv.policy not in QUERY_POLICIES and "." not in kv.policy) else kv.window
    positions = shape.layers * shape.kv_heads * capacity * 4
    return capacity * token_bytes(shape, itemsize), positions + shape.layers * shape.q_heads * shape.head_dim * ring * itemsize
