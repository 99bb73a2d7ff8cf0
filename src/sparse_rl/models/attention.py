"""Attention of transformers models over our caches: one function, registered once, that calls a view.

A view is any object with `attend(layer, queries, keys, values, scale, mask)`: prompts in prefill, slots in decode, a rollout
in replay. It is passed as an argument of the model's forward, or inside the keys that a cache returns. Without a view the
function is transformers' own SDPA, so a prepared model behaves as before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import UserError, first_line
from ..kv.cache import CacheShape

NAME = "sparse_rl"
"""Name of the attention implementation, for `model.set_attn_implementation`."""


class AttentionView(Protocol):
    def attend(
        self, layer: int, queries_BQTD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, scale: float, mask: Tensor | None
    ) -> Tensor:
        """Return the attention [B, Q, T, D]. Only the view of a transformers cache reads the mask, for padding."""
        ...


@dataclass(frozen=True)
class BoundKeys:
    """New keys and values for the view of a transformers cache, which has received `seen` tokens before them."""

    view: AttentionView
    keys_BHTD: Tensor
    values_BHTD: Tensor
    seen: int

    def __getattr__(self, name: str):
        raise UserError(
            "A BoundedCache needs the attention that knows it: call model.set_attn_implementation('sparse_rl') first "
            "(if you did, this model handles keys in a way of its own and cannot use one)."
        )


def attention(module, query, key, value, attention_mask, scaling=None, sparse_view=None, **kwargs):
    bound = isinstance(key, BoundKeys)
    if bound:
        window, tokens = kwargs.get("sliding_window"), key.seen + query.shape[2]
        if window and tokens > window:
            raise UserError(f"A BoundedCache does not slide: {tokens} tokens pass the model's sliding window of {window}.")
        sparse_view, key, value = key.view, key.keys_BHTD, key.values_BHTD
    if sparse_view is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name, meaning in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} uses {meaning}, which is not supported: use another model.")
    if not bound and (attention_mask is None or attention_mask.dtype != torch.bool or attention_mask.shape != NO_MASK):
        raise UserError(
            f"{type(module).__name__} masks attention in a way of its own, which is not supported: use another model."
        )
    if isinstance(sparse_view, _Probe):
        sparse_view.note(module, query, key, value, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_BQTD = sparse_view.attend(module.layer_idx, query, key, value, scale, attention_mask)
    return out_BQTD.transpose(1, 2).contiguous(), None


UNSUPPORTED = {
    "softcap": "soft-capped logits",
    "s_aux": "learned sinks",
    "position_bias": "a position bias",
    "block_indices": "sparse attention of its own",
}
KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Supported entries of layer_types: attention over all keys of a sequence, as long as it fits the window."""

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass(frozen=True)
class AttentionLimits:
    """Cache shape and limits of a prepared model's attention."""

    shape: CacheShape
    context: int | None
    """Positions the model was made for; None if its configuration does not say."""
    hard: bool
    """True if no position beyond the context exists, because positions come from a table."""
    sliding_window: int | None
    """Shortest sliding window of any layer. It has no effect on sequences within it."""
    vocab: int
    stays: bool = False
    """True if the limits hold for any dtype of the weights. The weights of a sharded model change theirs between passes."""


def run(model: PreTrainedModel, tokens_BT: Tensor, positions_BT: Tensor, view: AttentionView, keep: Tensor | int) -> Tensor:
    """Return the logits [B, n, V] of the tokens in `keep`, with attention computed by the view."""
    return model(**inputs(tokens_BT, positions_BT, view), logits_to_keep=keep).logits


def inputs(tokens_BT: Tensor, positions_BT: Tensor, view: AttentionView) -> dict[str, Any]:
    """Return the arguments of a model or its decoder that make the view compute attention."""
    return {
        "input_ids": tokens_BT,
        "position_ids": positions_BT,
        "attention_mask": tokens_BT.new_empty(NO_MASK, dtype=torch.bool),
        "use_cache": False,
        "sparse_view": view,
    }


def attend_to_itself(queries_BQTD: Tensor, values_BHTD: Tensor) -> Tensor:
    """Return the attention of a single token over itself."""
    return values_BHTD.repeat_interleave(queries_BQTD.shape[1] // values_BHTD.shape[1], dim=1)


NO_MASK = (1, 1, 1, 1)  # four dimensions: transformers takes it for a finished mask and builds none
SPARE_ROWS = 8  # extra rows of a position table; OPT's has 2

_prepared: WeakKeyDictionary[PreTrainedModel, AttentionLimits] = WeakKeyDictionary()


def prepare(model: PreTrainedModel) -> AttentionLimits:
    """Switch the model to our attention and check with one token whether its attention is supported.

    Runs once per model, and again if its attention, dtype or device has changed.
    """
    known = _prepared.get(model)
    place = (model.dtype, model.device)
    if (
        known is not None
        and model.config._attn_implementation == NAME
        and (known.stays or place == (known.shape.dtype, known.shape.device))
    ):
        return known
    config = model.config.get_text_config()
    kind = f"{type(model).__name__} ({config.model_type})"
    _refuse_by_config(model, config, kind)
    before = model.config._attn_implementation
    probe = _Probe()
    try:
        model.set_attn_implementation(NAME)
        with torch.no_grad(), eval_mode(model):
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            run(model, token, token, probe, keep=1)
        shape = probe.shape(kind, config.num_hidden_layers)
        _refuse_by_layers(config, kind)
    except Exception as error:
        model.set_attn_implementation(before)
        if isinstance(error, (UserError, torch.OutOfMemoryError)):
            raise
        raise UserError(f"{kind} does not run with sparse-rl's attention ({first_line(error)}): use another model.") from error
    windows, context = [*probe.sliding_windows, *_windows_of_the_mask(config)], _context(config)
    hard = context is not None and _has_table(model, context)
    limits = AttentionLimits(shape, context, hard, min(windows, default=None), config.vocab_size)
    _prepared[model] = limits
    return limits


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode inside the block and restore their modes afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def prepared_like(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Give this model the limits of another that computes the same. They hold for any dtype of its weights."""
    model.set_attn_implementation(NAME)
    _prepared[model] = replace(prepare(other), stays=True)


def _refuse_by_config(model: PreTrainedModel, config, kind: str) -> None:
    if model.config.is_encoder_decoder:
        raise UserError(f"{kind} is an encoder-decoder: sparse-rl takes decoder-only causal language models.")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            raise UserError(
                f"{kind} rotates by sequence length (rope_type {parameters['rope_type']}), so cached keys cannot be "
                "replayed: use a model with default, linear, yarn or llama3 rope."
            )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UserError(f"{kind} shares keys between layers, which a cache per layer cannot hold: use another model.")


def _refuse_by_layers(config, kind: str) -> None:
    other = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS)
    if other:
        raise UserError(
            f"{kind} does more than attention over cached keys: it has layers of type {other[0]}, which is not supported. "
            "Use another model."
        )


def _context(config) -> int | None:
    """Return the number of positions in the configuration. YaRN multiplies those of the original training."""
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if positions is None or rope.get("rope_type") != "yarn" or not rope.get("factor"):
        return positions
    return max(positions, int(rope["factor"] * (rope.get("original_max_position_embeddings") or positions)))


def _has_table(model: PreTrainedModel, context: int) -> bool:
    """Return whether positions are looked up: in an embedding other than the tokens', or in a buffer, with a few spare
    rows."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = [table for table in tables if table is not model.get_input_embeddings().weight]
    tables += [buffer for buffer in model.buffers() if buffer.dim() == 2]
    return any(context <= len(table) <= context + SPARE_ROWS for table in tables)


def _windows_of_the_mask(config) -> list[int]:
    """Return the windows that some models apply only through the mask, which our views do not use."""
    layer_types = getattr(config, "layer_types", None)
    local = layer_types is None or any(kind != "full_attention" for kind in layer_types)
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return [size for size in sizes if size] if local else []


@dataclass
class _Probe:
    """View that records shapes and windows: one token through every layer."""

    layers: list[int] = field(default_factory=list)
    shapes: set[tuple] = field(default_factory=set)
    sliding_windows: list[int] = field(default_factory=list)
    last: Tensor | None = None

    def note(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict) -> None:
        if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
            raise UserError(
                f"{type(module).__name__} is not causal (is_causal = False): it looks ahead, so it cannot sample. Use a causal "
                "language model, or set is_decoder where its config.json has that."
            )
        self.shapes.add((query.shape[1], key.shape[1], query.shape[-1], key.shape[-1], value.shape[-1]))
        if kwargs.get("sliding_window"):
            self.sliding_windows.append(kwargs["sliding_window"])
        self.last = key

    def attend(self, layer, queries_BQTD, keys_BHTD, values_BHTD, scale, mask):
        self.layers.append(layer)
        return attend_to_itself(queries_BQTD, values_BHTD)

    def shape(self, kind: str, layers: int) -> CacheShape:
        if self.last is None:
            raise UserError(
                f"{kind} does not compute attention through transformers' attention interface: use a model that does."
            )
        if len(self.shapes) > 1:
            raise UserError(
                f"{kind} has layers of different head shapes, which one cache tensor cannot hold: use another model."
            )
        ((q_heads, kv_heads, q_dim, k_dim, v_dim),) = self.shapes
        if not q_dim == k_dim == v_dim:
            raise UserError(
                f"{kind} has keys of {k_dim} and values of {v_dim} dimensions (MLA), which is not supported: use another model."
            )
        if sorted(self.layers) != list(range(layers)):
            raise UserError(
                f"{kind} calls attention {len(self.layers)} times in {layers} layers, as hybrid models do: "
                "use a model with attention once in every layer."
            )
        return CacheShape(layers, q_heads, kv_heads, k_dim, self.last.dtype, self.last.device)
