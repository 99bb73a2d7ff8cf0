"""Where transformers models meet our caches: one attention function, registered once, that hands over to a view.

A view is whatever answers `attend(layer, queries, keys, values, scale, positions)`: the prompts being prefilled, the
slots being decoded, a rollout being replayed. It travels as an argument of the model's forward, or inside the keys a
cache returns. Without a view the function is transformers' own SDPA, so a prepared model behaves as before.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import UserError
from ..kv.cache import CacheShape

NAME = "sparse_rl"
"""Of the attention implementation, for `model.set_attn_implementation`."""


class View(Protocol):
    def attend(
        self,
        layer: int,
        queries_BQTD: Tensor,
        keys_BHTD: Tensor,
        values_BHTD: Tensor,
        scale: float,
        positions_BT: Tensor | None,
    ) -> Tensor:
        """[B, Q, T, D]."""
        ...


@dataclass(frozen=True)
class BoundKeys:
    """Keys and values on their way to the view of a transformers cache."""

    view: View
    keys_BHTD: Tensor
    values_BHTD: Tensor

    def __getattr__(self, name: str):
        raise UserError(
            "A BoundedCache needs the attention that knows it: call model.set_attn_implementation('sparse_rl') first."
        )


def attention(module, query, key, value, attention_mask, scaling=None, sparse_view=None, position_ids=None, **kwargs):
    if isinstance(key, BoundKeys):
        sparse_view, key, value = key.view, key.keys_BHTD, key.values_BHTD
    if sparse_view is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if isinstance(sparse_view, _Probe):
        sparse_view.note(query, key, value, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_BQTD = sparse_view.attend(module.layer_idx, query, key, value, scale, position_ids)
    return out_BQTD.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass(frozen=True)
class AttentionLimits:
    """What a prepared model's attention asks for and how far it reaches."""

    shape: CacheShape
    context: int | None
    """Positions the model was made for, None if its configuration does not say."""
    sliding_window: int | None
    """The shortest sliding window of any layer: sequences within it never notice."""
    vocab: int


def run(model: PreTrainedModel, tokens_BT: Tensor, positions_BT: Tensor, view: View, keep: Tensor | int) -> Tensor:
    """Logits [B, n, V] of the tokens `keep` names, with attention left to the view."""
    no_mask = tokens_BT.new_empty(1, 1, 1, 1, dtype=torch.bool)  # four dimensions: transformers builds none of its own
    output = model(
        input_ids=tokens_BT,
        position_ids=positions_BT,
        attention_mask=no_mask,
        use_cache=False,
        logits_to_keep=keep,
        sparse_view=view,
    )
    return output.logits


def prepare(model: PreTrainedModel) -> AttentionLimits:
    """Switch the model to our attention and find out, with one token, whether its attention is one we get right."""
    config = model.config.get_text_config()
    kind = f"{type(model).__name__} ({config.model_type})"
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
    before = model.config._attn_implementation
    probe = _Probe()
    try:
        model.set_attn_implementation(NAME)
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            run(model, token, token, probe, keep=1)
        shape = probe.shape(kind, config.num_hidden_layers)
    except BaseException:
        model.set_attn_implementation(before)
        raise
    return AttentionLimits(
        shape=shape,
        context=getattr(config, "max_position_embeddings", None),
        sliding_window=min(probe.sliding_windows, default=None),
        vocab=config.vocab_size,
    )


@dataclass
class _Probe:
    """The view that only looks: one token through every layer."""

    layers: list[int] = field(default_factory=list)
    shapes: set[tuple] = field(default_factory=set)
    sliding_windows: list[int] = field(default_factory=list)
    extras: set[str] = field(default_factory=set)
    last: Tensor | None = None

    def note(self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict) -> None:
        self.shapes.add((query.shape[1], key.shape[1], query.shape[-1], key.shape[-1], value.shape[-1]))
        if kwargs.get("sliding_window"):
            self.sliding_windows.append(kwargs["sliding_window"])
        self.extras |= {name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None}
        self.last = key

    def attend(self, layer, queries_BQTD, keys_BHTD, values_BHTD, scale, positions_BT):
        self.layers.append(layer)
        groups = queries_BQTD.shape[1] // values_BHTD.shape[1]
        return values_BHTD.repeat_interleave(groups, dim=1)  # one token attends to itself

    def shape(self, kind: str, layers: int) -> CacheShape:
        if self.last is None:
            raise UserError(
                f"{kind} does not compute attention through transformers' attention interface: use a model that does."
            )
        if sorted(self.layers) != list(range(layers)):
            raise UserError(
                f"{kind} has attention in {len(self.layers)} of {layers} layers (a hybrid model): "
                "use a model with attention in every layer."
            )
        if self.extras:
            names = {"softcap": "soft-capped logits", "s_aux": "learned sinks", "position_bias": "a position bias"}
            raise UserError(f"{kind} uses {names[min(self.extras)]} in attention, which is not supported: use another model.")
        if len(self.shapes) > 1:
            raise UserError(
                f"{kind} has layers of different head shapes, which one cache tensor cannot hold: use another model."
            )
        ((q_heads, kv_heads, q_dim, k_dim, v_dim),) = self.shapes
        if not q_dim == k_dim == v_dim:
            raise UserError(
                f"{kind} has keys of {k_dim} and values of {v_dim} dimensions (MLA), which is not supported: use another model."
            )
        return CacheShape(layers, q_heads, kv_heads, k_dim, self.last.dtype, self.last.device)
