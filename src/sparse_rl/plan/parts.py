"""Compute the GPU memory of weights, optimizer state and passes of a training run, by part.

The sizes of weights and optimizer state are exact. Activation sizes are derived from the tensors that autograd saves in a
compiled layer of attention and one MLP. Those of other layers are estimated from the widths of their linear layers. `sizes.py`
holds the constants that the plan shares with the engine and the learner.
"""

# N tokens of a micro-batch, n response tokens among them, F intermediate size

from ..config import KV, SHADOW_METHODS, WORTH_COMPILING, Config
from ..kv.schedule import Schedule
from ..sizes import (
    CHUNK_ELEMENTS,
    FIRST_TOKENS,
    FUSED_CHUNK_ELEMENTS,
    KEYS_PER_TOKEN,
    LARGE_VOCABULARY,
    PREFILL_TOKENS,
    SHADOW_BLOCK,
    STEP_LOGIT_BYTES,
    padded_length,
    token_bytes,
)
from .dimensions import Dimensions
from .microbatch import largest_pack, shares_prompts

# Constants that only the plan uses. `sparse-rl bench memory` compares the plan with a measured peak (docs/plan.md).
PLAIN_CHUNK_BYTES = 28
"""Bytes per element of a logits chunk with autograd: float32 logits, log-probs, exponentials and gradients."""
FIRST_TOKEN_BYTES = 26
"""Bytes per logit of a first token, sampled with plain torch: one half-precision, three float32 and two float64 copies."""
MLP_BACKWARD = 3
"""Number of [N, F] tensors that MLP backward holds in addition to saved ones: gradients of the product and its factors."""
MLP_FORWARD = 3
"""Number of [N, F] tensors that MLP forward holds: the product and its factors."""
LORA_MLP_BYTES = 8
"""Bytes per element of the temporary float32 copies of an [N, F] tensor, which adapters make."""
FOUR_BIT_BYTES = 0.5 + (1 + 4 / 256) / 64
"""Bytes per weight in 4 bits: half a byte, plus an 8-bit scale per block of 64 and a float32 scale per 256 blocks."""
STATE_8BIT_BYTES = 2.04
"""Bytes per weight of both 8-bit moments: one byte each, plus one float32 scale per 256 values."""
STEP_8BIT_BYTES = 12
"""Bytes per element of the largest weight during its 8-bit update: both moments and the step in float32."""
EXPERT_INDEX_BYTES = 40
"""Bytes of the indices and routing weights that a token and one of its experts save."""
SAVED_COPIES = 1.5
"""Number of copies that a layer saves of the inputs and outputs of its linear layers (estimated): linear layers save their input,
and activations, convolutions and recurrent kernels save theirs. With adapters it is one, because frozen layers save no input."""
STATE_COPIES = 3
"""Number of temporary copies of a layer's recurrent state in a decode step (estimated): its product, its update and their sum."""
CHUNK_TOKENS = 64
"""Tokens per chunk of the parallel form of a recurrent layer, which holds a state per chunk. Some kernels have larger chunks."""
BATCH_TENSORS = 12
"""Number of float32 [rollouts, tokens] tensors that an update reads."""


# Resident memory


def itemsize(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


def logit_bytes(config: Config) -> int:
    return max(itemsize(config), 4 if config.model.head_dtype == "float32" else 2)


def resident(config: Config, dims: Dimensions) -> dict[str, int]:
    """Return the bytes of weights and optimizer state that stay allocated between steps, by part."""
    size, lora, state = itemsize(config), config.model.lora, config.optimizer.state
    parts, shards = {"weights": weight_bytes(config, dims)}, config.ranks.count
    moment_bytes = {"fp32": 8.0, "8bit": STATE_8BIT_BYTES, "offload": 0.0}[state]
    if lora.rank:
        adapters = dims.adapter_params(lora.targets, lora.rank)
        parts["adapters"] = 4 * adapters  # peft stores adapters in float32, so they need no master copy
        parts["merged copy"] = size * dims.adapted_params(lora.targets) if lora.merges_copy else 0
        trained = adapters
    elif shards > 1:  # the full model for sampling, and float32 shards of the trained weights
        parts["reference copy"] = 4 * dims.params // shards if config.loss.kl_coef > 0 else 0
        parts["float32 masters"] = 4 * dims.params // shards
        trained = dims.params // shards
    else:
        parts["reference copy"] = dims.params * size if config.loss.kl_coef > 0 else 0
        parts["float32 masters"] = 4 * dims.params if size < 4 and state != "offload" else 0
        trained = dims.params
    parts["optimizer moments"] = int(moment_bytes * trained)
    return parts


def weight_bytes(config: Config, dims: Dimensions) -> int:
    """Return the bytes of the model's weights. A base in 4 bits stores the linear layers of the blocks in fewer bytes."""
    size, linear = itemsize(config), dims.weights.quantised
    if config.model.lora.base == "4bit":
        return int(FOUR_BIT_BYTES * linear) + size * (dims.params - linear)
    return size * dims.params


def expanded_bytes(config: Config, dims: Dimensions) -> int:
    """Return the bytes of the largest linear layer in the model's dtype if the base is in 4 bits, else 0. A pass expands one
    layer at a time."""
    if config.model.lora.base != "4bit":
        return 0
    return itemsize(config) * max(linear.inputs * linear.outputs for linear in dims.weights.linears)


def gradient_bytes(config: Config, dims: Dimensions) -> int:
    """Return the bytes of the gradients, which are accumulated in float32 over the micro-batches of an update."""
    lora = config.model.lora
    trained = dims.adapter_params(lora.targets, lora.rank) if lora.rank else dims.params
    if sharded(config):
        held = dims.params if config.ranks.hold_gradients else max(dims.layer_params, outside_layers(dims))
        return 4 * (dims.params // config.ranks.count + held)
    return 4 * trained


def sharded(config: Config) -> bool:
    return config.ranks.count > 1 and not config.model.lora.rank


def outside_layers(dims: Dimensions) -> int:
    return dims.params - dims.weights.in_layers


def gathered_bytes(config: Config, dims: Dimensions) -> int:
    """Return the bytes of the weights that FSDP2 gathers in a pass: non-layer weights, the current and the next layer."""
    return itemsize(config) * (outside_layers(dims) + 2 * dims.layer_params) if sharded(config) else 0


# Memory of a pass


def fuses(dims: Dimensions) -> bool:
    return dims.params >= WORTH_COMPILING


def kept_per_token(config: Config, dims: Dimensions) -> int:
    """Return the bytes per token that autograd saves for backward in one layer, the widest."""
    size, lora = itemsize(config), config.model.lora
    linears = dims.adapted(lora.targets) if lora.rank else []
    adapted = {linear.name for linear in linears}
    widen = 4 if adapted and size < 4 else 0  # adapters read a float32 copy of their input
    fused = fuses(dims)
    # norms save their input; uncompiled, in float32, plus the normalised values if the norm's weight is trained
    input_bytes, weight_bytes_saved = dims.family.norm_copies
    norm = size if fused else input_bytes + (0 if adapted else weight_bytes_saved or size)
    kept = dims.family.norms * dims.hidden * norm + ((dims.q_width + dims.kv_width) * norm if dims.family.qk_norm else 0)
    kept += 4 * lora.rank * sum(linear.count for linear in linears) // dims.layers
    inputs_of_all = sum(linear.count * linear.inputs for linear in linears) // dims.layers
    if dims.estimated_width:
        kept += int((1 if adapted else SAVED_COPIES) * size * dims.estimated_width) + widen * inputs_of_all
        return kept + 4 * dims.q_heads + (dims.active_experts * EXPERT_INDEX_BYTES if dims.experts else 0)
    if fused and dims.family.norms == 4:  # the residual after attention is recomputed from what these norms save
        kept -= dims.hidden * size
    # linear layers save their input: the output of the norm, or a float32 copy of it for adapters
    if adapted and dims.counted:  # its linear layers that share an input are unknown
        kept += widen * inputs_of_all
    elif adapted:
        copies = sum(name in adapted for name in ("q_proj", "k_proj", "v_proj")), 2
        if fused:  # projections that share an input share its copy
            copies = min(copies[0], 1), 1
        if dims.experts:
            copies = copies[0], 0
        kept += widen * (sum(copies) * dims.hidden + (0 if dims.experts else dims.intermediate))
        kept += widen * dims.q_width if "o_proj" in adapted else 0
    else:
        kept += (1 if dims.family.parallel else 2) * dims.hidden * size
    # attention saves queries, keys, values, output and one sum per head; float32 attention also repeats keys, copies outputs
    kept += (2 * dims.q_width + 2 * dims.kv_width) * size if size < 4 else 5 * dims.q_width * size
    kept += 4 * dims.q_heads
    # the MLP saves gate, up, and their product if the down projection is trained; uncompiled, also the gate's activation
    trained = 0 if adapted else 1
    if dims.experts:  # uncompiled, clamps and the sigmoid are saved, too; each expert has its own input and output
        expert_bytes = (2 + trained + (0 if fused else 4)) * dims.intermediate * size + (1 + trained) * dims.hidden * size
        kept += dims.active_experts * (expert_bytes + EXPERT_INDEX_BYTES)
    else:
        kept += (2 + trained + (0 if fused else 1)) * dims.intermediate * size
    return kept + (trained * dims.q_width * size if dims.family.sinks else 0)  # the output before the sink's share


def transient_per_token(config: Config, dims: Dimensions, *, backward: bool) -> int:
    """Return the bytes per token of temporary tensors in the layer that is being computed."""
    size, lora = itemsize(config), config.model.lora.rank > 0
    if dims.estimated_width:  # inputs and outputs, or their gradients, and a state per chunk with its gradient
        wide = LORA_MLP_BYTES * dims.widest if lora and size < 4 else 0
        states = (2 if backward else 1) * dims.largest_state_bytes(size) // CHUNK_TOKENS
        return (dims.estimated_width + 4 * dims.hidden) * size + states + wide
    wide = LORA_MLP_BYTES * dims.intermediate if lora and size < 4 and not dims.experts else 0
    mlp_elements = (MLP_BACKWARD if backward else MLP_FORWARD) * dims.intermediate + (2 * dims.hidden if dims.experts else 0)
    return dims.active_experts * mlp_elements * size + 4 * dims.hidden * size + wide


def head_bytes(config: Config, dims: Dimensions, n: int, *, backward: bool) -> int:
    """Return the bytes of one chunk of logits and its hidden states.

    In backward this includes the LM head's gradient, accumulated in float32, and the gradient of one chunk.
    """
    size, logit = itemsize(config), logit_bytes(config)
    if dims.vocab >= LARGE_VOCABULARY:
        chunk = min(FUSED_CHUNK_ELEMENTS, n * dims.vocab) * (logit + (size if backward else 0))
    else:
        chunk = min(CHUNK_ELEMENTS, n * dims.vocab) * (logit + (20 if backward else 12))
    if backward and config.method == "smd":  # autograd computes the gradient of the divergence
        chunk = max(chunk, min(CHUNK_ELEMENTS, n * dims.vocab) * PLAIN_CHUNK_BYTES)
    if backward and not config.model.lora.rank:
        chunk += dims.embedding_params * (4 + size)
    return chunk + n * dims.hidden * size * (2 if backward else 1)


def update_parts(config: Config, dims: Dimensions, prompt_tokens: int, checkpointed: int) -> dict[str, int]:
    """Return the bytes of the backward pass of the largest micro-batch, by part, if the first `checkpointed` layers recompute
    their activations.

    The peak occurs in the LM head, in backward of the last layer, or in backward of the last layer that recomputes its
    activations. The largest of the three counts.
    """
    size = itemsize(config)
    pack = largest_pack(prompt_tokens, config, plain=dims.plain)
    n, tokens = pack.responses, pack.tokens
    shadow = config.method in SHADOW_METHODS
    layer = kept_per_token(config, dims) * tokens
    if shares_prompts(config, plain=dims.plain):  # each response has a copy of its prompt's keys and values
        layer += (KEYS_PER_TOKEN - 1) * 2 * dims.kv_width * size * tokens
    if shadow or dims.needs_flex:  # FlexAttention pads the sequence to a power of two
        layer += (padded_length(tokens) - tokens) * 2 * (dims.q_width + dims.kv_width) * size
    ends = 2 * dims.hidden * size * tokens
    inputs = checkpointed * dims.hidden * size * tokens + ends
    kept = inputs + (dims.layers - checkpointed) * layer
    if config.method == "smd" and config.loss.smd.direction != "shadow_to_dense":
        inputs, kept = 2 * inputs, 2 * kept
    evictions = 0
    if shadow:
        evictions = 5 * dims.layers * dims.kv_heads * tokens * 4
        evictions += block_list_bytes(dims, padded_length(tokens), max(1, dims.layers - checkpointed))
    elif dims.needs_flex:
        evictions = block_list_bytes(dims, padded_length(tokens), max(1, dims.layers - checkpointed), shared=2)
    in_head = kept, head_bytes(config, dims, n, backward=True)
    head_gradient = 0 if config.model.lora.rank else dims.embedding_params * size
    transient = transient_per_token(config, dims, backward=True) * tokens
    in_layer = kept + transient, head_gradient
    recomputing = (inputs + layer + transient if checkpointed else 0), head_gradient
    activations, logits = max(in_head, in_layer, recomputing, key=sum)
    batch = config.rollout.rollouts_per_step * config.rollout.max_tokens * 4 * BATCH_TENSORS
    return {
        "gathered layers": gathered_bytes(config, dims),
        "expanded layer": expanded_bytes(config, dims),
        "gradients": gradient_bytes(config, dims),
        "activations": activations + evictions,
        "logits chunk": logits,
        "batch": batch,
    }


def block_list_bytes(dims: Dimensions, padded: int, kept_layers: int, shared: int | None = None) -> int:
    """Return the bytes of FlexAttention's block lists: four lists of [heads, B, B] and their lengths, for B blocks.

    The lists exist once for the kv heads of all layers, and again for all query heads of each layer that backward still needs.
    Without evictions, the layers have `shared` lists: one with the window and one without.
    """
    blocks = padded // SHADOW_BLOCK
    heads = (dims.layers * dims.kv_heads if shared is None else shared) + kept_layers * dims.q_heads
    return 4 * heads * blocks * (blocks + 1) * 4


def prefill_parts(config: Config, dims: Dimensions, kv: KV, slots: int, prompts: int, prompt_tokens: int) -> dict[str, int]:
    """Return the bytes of prefill: prompt activations in one layer, keys and values of a long prompt, and first-token logits.

    A long prompt runs in pieces. First tokens are sampled in batches of at most `FIRST_TOKENS`.
    """
    packed = min(PREFILL_TOKENS, prompts * prompt_tokens)
    layers, tokens = 0, prompt_tokens
    if prompt_tokens > PREFILL_TOKENS:
        layers = Schedule.of(kv, kv.policy != "full").scratch_layers(prompt_tokens, dims.full.layers)
    if kv.policy == "full":  # a paused sequence is recomputed in pieces, too
        layers, tokens = min(1, dims.full.layers), prompt_tokens + config.rollout.max_tokens
        packed = min(PREFILL_TOKENS, max(packed, tokens))
    logits = slots * logit_bytes(config) + min(slots, FIRST_TOKENS) * FIRST_TOKEN_BYTES
    states = 2 * slots * dims.largest_state_bytes(itemsize(config))  # of the prompts, and the copies for their samples
    return {
        "prefill scratch": packed * transient_per_token(config, dims, backward=False) + states,
        "expanded layer": expanded_bytes(config, dims),
        "long prompt": tokens * layers * token_bytes(dims, itemsize(config)) // dims.layers,
        "decode step": logits * dims.vocab,
    }


def step_bytes(dims: Dimensions, slots: int, size: int) -> int:
    """Return the bytes of one decode step: the logits, and the activations and states of the widest layer."""
    width = dims.estimated_width or 3 * dims.active_experts * dims.intermediate
    layer_bytes = (width + 6 * dims.hidden) * size + STATE_COPIES * dims.largest_state_bytes(size)
    return slots * (dims.vocab * STEP_LOGIT_BYTES + layer_bytes)
