"""Sizes that determine memory use: chunks, tiles, scratch buffers and bytes per slot. Imports no torch.

The allocating code and `sparse-rl plan`, which predicts the allocation, use these values.
"""

import math
from collections.abc import Collection, Iterable
from typing import Protocol

from .config import KV, SHADOW_METHODS, Config

# Learner

CHUNK_ELEMENTS = 2**26
"""Maximum number of logits in a chunk: 256 MiB in float32, and about four times that with the tensors derived from them."""
FUSED_CHUNK_ELEMENTS = 2**27
"""Maximum number of logits in a chunk computed by one fused kernel: 512 MiB in float32, plus 256 MiB for a gradient in half
precision. Larger chunks write the LM head's gradient less often."""
LARGE_VOCABULARY = 16384
"""Vocabulary size below which chunks are not compiled, because they are already cheap."""
SHADOW_BLOCK = 128
"""Block size of FlexAttention in a shadow pass, in tokens."""


def padded_length(tokens: int) -> int:
    """Return the padded length of a shadow pass: the next power of two, and at least one block."""
    return max(SHADOW_BLOCK, 1 << (tokens - 1).bit_length())


KEYS_PER_TOKEN = 2
"""Maximum number of keys per token of a learner pass. Every response that shares a prompt has a copy of its keys."""


def worth_sharing(prompt_tokens: int, response_tokens: int) -> bool:
    """Return whether a learner pass computes the prompt once for several responses, if one of them has this length."""
    return 16 * prompt_tokens >= response_tokens


# Sampler

PREFILL_TOKENS = 8192
"""Maximum prompt tokens per forward pass. A longer prompt runs in pieces."""
CHUNK_STEPS = {"cpu": 8, "cuda": 16}
"""Maximum decode steps between two returns to the host, by device type. A finished slot idles until the next return."""
FIRST_TOKENS = 64
"""Number of logit rows sampled at a time after prefill. Bounds the memory of torch's float64 sums."""
STEP_LOGIT_BYTES = 4
"""Bytes per logit in a decode step: the logit and the state of the sampling kernel."""
MAX_AUTO_SLOTS = 1024
"""Upper limit of the automatic slot count. Matrix products reach full speed at far fewer slots, while host work grows with the
count."""
SCRATCH_SHARE = 0.05
"""Share of the cache size, in the model's dtype, reserved for temporary buffers during compaction."""
SCRATCH_FLOOR_BYTES = 16 * 2**20
"""Minimum size of the compaction scratch buffer, so that a cache of a few MiB is not compacted row by row."""
PAGE_TOKENS = 64
"""Tokens of a page of the prompt store."""
DENSE_SLOT_TOKENS = 2 * PAGE_TOKENS
"""Tokens of a dense slot. It holds the newest tokens of its sequence; the pool of pages holds the others."""
ONCE_KEYS = 2**18
"""Prompt keys of a layer that the slots read in a step (tokens times kv heads), above which reading each prompt once for 8 samples
is faster than reading it in each slot. Measured on an H200 in 16, 8 and 4 bits with 2 and 4 kv heads (benchmarks/shared_prompts.py).
Speed relative to reading in each slot: 0.8 to 1.2 at 141,000 keys, 0.8 to 1.3 at 262,000, 1.0 to 3.6 from 282,000 on. With groups of 1 to
8 slots it is 1.3 to 2.1 in 16 bits, and 0.8 to 1.4 in 8 and 4 bits."""
ONCE_SAMPLES, ONCE_GROUP = 8, 8
"""Fewest samples per prompt, and most query heads per kv head, with which that was measured. With more query heads, fewer slots
share a read."""
STRAGGLER_FACTOR = 2
"""Groups that the prompt store has room for, as a multiple of the groups that fill the slots. A group keeps its pages until its
last sample ends. With 8 samples per group and uniform response lengths, about 1.8 times as many groups are alive (estimated)."""
QUERY_POLICIES = ("rkv", "snapkv", "tova")
"""Built-in policies with `uses_queries = True`, which keep a ring buffer of recent queries."""
NOISE_ROLLOUTS = 8
"""Rollouts of a step that are replayed to measure engine noise, for methods that do not replay them all."""


def recorded_rollouts(config: Config, count: int) -> range:
    """Return the rollouts of a round of `count` whose evictions are recorded: all if the loss uses the sampler's view, else a
    few for engine noise and the log."""
    if config.method in SHADOW_METHODS:
        return range(count)
    few = max(NOISE_ROLLOUTS, config.log.traces_per_step)
    return range(0, count, max(1, count // few))[:few]


class AttentionShape(Protocol):
    """Attention dimensions of a model. `CacheShape` and the plan's `Dimensions` implement this protocol."""

    @property
    def layers(self) -> int: ...
    @property
    def q_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def local(self) -> "AttentionShape": ...


STEP_BYTES = 2
"""Bytes of the scale of a quantised token: a float16 step for each group of channels."""
GROUP_CHANNELS = 32
"""Channels of a 4-bit token that share a step. A smaller group follows the values more closely and has more steps to store."""
HEAD_MULTIPLE = 4
"""Quantised heads must have a multiple of this many channels, because two bytes hold four 4-bit codes."""
LARGEST_4BIT_SHARE = 0.95
"""Largest size of a head in 4 bits, relative to 8. Steps of small groups take more."""


def group_channels(head_dim: int) -> int:
    """Return the channels of a 4-bit head that share a step: at most GROUP_CHANNELS. A group lies in one half of the head."""
    return math.gcd(GROUP_CHANNELS, head_dim // 2)


def code_bytes(head_dim: int, dtype: str) -> int:
    """Return the bytes of a quantised head of one token: its codes and steps. `dtype` is 8bit or 4bit."""
    if dtype == "8bit":
        return head_dim + STEP_BYTES
    return head_dim // 2 + head_dim // group_channels(head_dim) * STEP_BYTES


def codes_problem(head_dim: int, dtype: str) -> str | None:
    """Return why heads of this dimension cannot be quantised, or why 4 bits do not pay; else None."""
    if head_dim % HEAD_MULTIPLE:
        return (
            f"The model's head dimension = {head_dim} is not a multiple of {HEAD_MULTIPLE}: set kv.dtype = auto, or use another "
            "model."
        )
    size, size_8bit = code_bytes(head_dim, dtype), code_bytes(head_dim, "8bit")
    if dtype == "4bit" and size > LARGEST_4BIT_SHARE * size_8bit:
        return (
            f"kv.dtype = 4bit saves nothing with the model's head dimension = {head_dim}: a head takes {size} bytes per token, "
            f"and {size_8bit} with 8bit. Set kv.dtype = 8bit."
        )
    return None


def token_bytes(shape: AttentionShape, itemsize: int, dtype: str = "auto") -> int:
    """Return the bytes of one cached token's keys and values, summed over all layers. `dtype` is `kv.dtype`; a
    quantised token has codes and steps."""
    dim = shape.head_dim
    of_head = dim * itemsize if dtype == "auto" else code_bytes(dim, dtype)
    return 2 * shape.layers * shape.kv_heads * of_head


def slot_bytes(shape: AttentionShape, kv: KV, itemsize: int) -> tuple[int, int]:
    """Return (bytes of keys and values, bytes of side tables) of one slot on a GPU, as `SlotCache` allocates them. `shape` is
    that of the layers without a window.

    A custom policy is counted as if it kept queries.
    """
    dense = kv.policy == "full"
    capacity = DENSE_SLOT_TOKENS if dense else kv.capacity
    ring = 0 if dense or not (kv.policy in QUERY_POLICIES or kv.has_custom_policy) else kv.recent
    positions = shape.layers * shape.kv_heads * capacity * 4
    keys = capacity * token_bytes(shape, itemsize, kv.dtype)
    return keys, positions + shape.layers * shape.q_heads * shape.head_dim * ring * itemsize


def window_capacity(longest: int) -> int:
    """Return the tokens of a ring of a sliding-window layer for sequences of at most `longest` tokens, unless the window is
    smaller. It is rounded up to whole pages, so that a similar call can reuse the ring."""
    return pages_of(longest) * PAGE_TOKENS


def window_bytes(shape: AttentionShape, longest: int, itemsize: int) -> int:
    """Return the bytes of keys and values in the sliding windows of a slot, for sequences of at most `longest` tokens, as
    `WindowStore` allocates them."""
    tokens = min(shape.window or 0, window_capacity(longest))
    return tokens * token_bytes(shape.local, itemsize)


def pages_of(tokens: int) -> int:
    """Return the number of pages that so many tokens take."""
    return -(-tokens // PAGE_TOKENS)


def pool_pages(prompt_lengths: Iterable[int], slots: int, samples: int) -> int:
    """Return the pages of a prompt store for `samples` responses to each of these prompts in `slots` slots.

    The store holds the longest prompts that can be alive at once.
    """
    return _rounded(sum(sorted(map(pages_of, prompt_lengths), reverse=True)[: _groups(slots, samples)]))


def dense_pages(prompt_lengths: Collection[int], response_tokens: int, slots: int, samples: int) -> int:
    """Return the pages of a dense cache in which no sequence waits for pages, even if all responses have full length.

    The lengths of prompts are upper bounds. A group shares the full pages of its prompt. The last page, if partly filled, is
    needed until all samples have started: by the groups that enter together, and by one group whose samples still wait.
    """
    longest, count = max(prompt_lengths), len(prompt_lengths)
    shared = sum(sorted((tokens // PAGE_TOKENS for tokens in prompt_lengths), reverse=True)[: _groups(slots, samples)])
    of_response = pages_beyond_slot(min(longest, PAGE_TOKENS - 1), response_tokens)
    entering = min(count, -(-slots // samples) + 1)
    own = max(entering, min(slots, count * samples) * of_response + 1)
    return max(_rounded(shared) + own, least_dense_pages(longest, response_tokens))


def pages_beyond_slot(held: int, response_tokens: int) -> int:
    """Return the pages that a dense sequence fills, if its slot holds `held` tokens and `response_tokens` are to be sampled.

    The slot keeps the newest tokens. The last sampled token is not fed, but the chunk runs on after the end.
    """
    return max(0, pages_of(held + response_tokens - 1 + max(CHUNK_STEPS.values()) - 1 - DENSE_SLOT_TOKENS))


def least_dense_pages(prompt_tokens: int, response_tokens: int) -> int:
    """Return the pages without which a sequence of full length could not end: its prompt, its response, and one page to
    recompute its newest tokens."""
    return pages_of(prompt_tokens) + pages_of(response_tokens) + 1


def live_dense_pages(prompt_tokens: int, response_tokens: int, slots: int, samples: int) -> int:
    """Return the pages that a dense cache fills with live tokens, if lengths are uniform up to `response_tokens`.

    A running sequence of final length L then holds E[L^2] / (2 E[L]) = `response_tokens` / 3 tokens on average. A sequence of
    full length also fits.
    """
    live = -(-slots // samples) * pages_of(prompt_tokens) + slots * pages_of(-(-response_tokens // 3))
    return max(live, least_dense_pages(prompt_tokens, response_tokens))


def running_in_pages(pages: int, prompt_lengths: Collection[int], response_tokens: int, slots: int, samples: int) -> int:
    """Return how many sequences of full length run at once in a dense cache: all slots if none waits for pages, or else as many
    as the pages hold at half of their response, the mean over its sampling."""
    if pages >= dense_pages(prompt_lengths, response_tokens, slots, samples):
        return slots
    sequence_pages = pages_of(response_tokens // 2) + pages_of(max(prompt_lengths)) / samples
    return max(1, min(slots, int(pages / sequence_pages)))


def dense_bytes(shape: AttentionShape, slots: int, pages: int, itemsize: int, dtype: str) -> int:
    """Return the bytes of keys and values in the slots and pages of a dense cache. `dtype` is `kv.dtype`."""
    return (slots * DENSE_SLOT_TOKENS + pages * PAGE_TOKENS) * token_bytes(shape, itemsize, dtype)


def _groups(slots: int, samples: int) -> int:
    """Return the most groups that are alive at once."""
    return min(slots, STRAGGLER_FACTOR * -(-slots // samples))


def _rounded(pages: int) -> int:
    """Round up by less than an eighth, so that a similar call can reuse the pool."""
    step = max(1, (1 << pages.bit_length()) // 16)
    return -(-pages // step) * step


def reads_prompts_once(shape: AttentionShape, itemsize: int, prompt_tokens: float, slots: int, samples: int) -> bool:
    """Return whether a decode step reads a stored prompt once for several slots, which is faster for long prompts."""
    many = samples >= ONCE_SAMPLES and shape.q_heads <= ONCE_GROUP * shape.kv_heads
    return itemsize == 2 and many and slots * prompt_tokens * shape.kv_heads > ONCE_KEYS


def page_table_width(longest: int) -> int:
    """Return the columns of the page table of a slot, for prompts of at most `longest` tokens."""
    return 1 << (pages_of(longest) - 1).bit_length()


def store_bytes(
    shape: AttentionShape, prompt_lengths: list[int], slots: int, samples: int, itemsize: int, dtype: str = "auto"
) -> tuple[int, int]:
    """Return (bytes of keys and values, bytes of side tables) of the prompt store, as `PromptStore` allocates them. `dtype` is
    `kv.dtype`."""
    keys = pool_pages(prompt_lengths, slots, samples) * PAGE_TOKENS * token_bytes(shape, itemsize, dtype)
    return keys, 4 * slots * page_table_width(max(prompt_lengths))
