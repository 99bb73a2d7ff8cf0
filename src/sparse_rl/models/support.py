"""Model support: check whether a model can run and gives correct results. There are three checks, each run once per model.

1. `prepare` runs one token through the model. It raises if a slot cache cannot hold the model's attention, and returns limits.
2. `head_of` compares the model's logits with hidden states times LM head, and returns the head with its scale.
3. `rollout/selfcheck.py` compares log-probs of whole sequences. It is in `rollout` because it runs the sampler's prefill and
   decode. `reduced.py` builds the small float32 model that it checks.

A failed check raises a UserError that names the model and the reason.
"""

# B rows, Q query heads, H kv heads, T tokens, D head dimension (hidden dimension in the head), V vocabulary

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..errors import UserError, first_line
from ..kernels.form import PLAIN, capped
from ..kv.shape import CacheShape, LayerState
from .attention import NAME, AttentionProbe, AttentionView, attend_to_itself, eval_mode, run
from .compile import decoder_layers
from .folder import changes_with_length, context_length
from .head import Head, decoder_output, hidden_states
from .recurrent import FAMILIES, Mixer, bind, layer_of, mixers

KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Supported entries of layer_types with attention alone: over all keys of a sequence that fits the window."""
TOKENWISE_LAYERS = {"mlp", "moe"}
"""Entries of layer_types that do not mix tokens."""
SPARE_ROWS = 8
"""Maximum extra rows of a buffer that is a position table, whatever its name."""
HEAD_DTYPE = "sparse_rl_head_dtype"
"""Attribute of a model that holds the dtype of its logits."""
LARGE_LOGIT = 256.0
"""Magnitude of the logits in the second check of the LM head. Soft caps are 15 to 50."""


@dataclass(frozen=True)
class AttentionLimits:
    """Cache shape and limits of the attention of a prepared model."""

    shape: CacheShape
    context: int | None
    """Context length of the model; None if its configuration does not state it."""
    positions: int | None
    """Number of positions that exist: rows of a table, or the length from which rotary frequencies change; None if any
    position does."""
    sliding_window: int | None
    """Shortest window or chunk that layers apply through the mask alone, which our views ignore. Longer sequences are
    refused."""
    vocab: int
    plain: bool = True
    """True if attention has no soft caps and no learned sinks."""
    any_dtype: bool = False
    """True if the limits hold for any dtype of the weights. A sharded model changes the dtype of its weights between
    passes."""


_prepared: WeakKeyDictionary[PreTrainedModel, AttentionLimits] = WeakKeyDictionary()
_scales: WeakKeyDictionary[PreTrainedModel, tuple[float, float | None]] = WeakKeyDictionary()
"""Scale and soft cap of each model's logits."""


def prepare(model: PreTrainedModel) -> AttentionLimits:
    """Switch the model to our attention, and check with one token whether its attention is supported.

    Runs once per model, and again if its attention implementation, dtype or device has changed. A model on the meta device needs no
    values, but then tables of positions are not found.
    """
    known = _prepared.get(model)
    place = (model.dtype, model.device)
    if (
        known is not None
        and model.config._attn_implementation == NAME
        and (known.any_dtype or place == (known.shape.dtype, known.shape.device))
    ):
        return known
    config = model.config.get_text_config()
    kind = f"{type(model).__name__} ({config.model_type})"
    _refuse_by_config(model, config, kind)
    _refuse_by_layers(model, config, kind)
    bind(model)
    before = model.config._attn_implementation
    probe = _Probe()
    try:
        model.set_attn_implementation(NAME)
        with torch.no_grad(), eval_mode(model), _Lookups() as lookups:
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            run(model, token, token, probe, keep=1)
            if not token.is_meta:
                run(model, token, token + 1, _OneToken(), keep=1)
        _refuse_unseen_layers(model, config, kind, probe)
        shape = probe.shape(kind, config)
    except Exception as error:
        model.set_attn_implementation(before)
        if isinstance(error, (UserError, torch.OutOfMemoryError)):
            raise
        raise UserError(_failure(model, kind, error)) from error
    windows, context = _windows_of_the_mask(config, shape), _context(config)
    positions = _positions(model, config, context, lookups)
    context = min((each for each in (context, positions) if each is not None), default=None)
    limits = AttentionLimits(shape, context, positions, min(windows, default=None), config.vocab_size, probe.plain)
    _prepared[model] = limits
    return limits


def head_of(model: PreTrainedModel) -> Head:
    """Return the model's LM head.

    The head is checked once, on one token, because some models post-process their logits.
    """
    layer = model.get_output_embeddings()
    if hasattr(layer, "get_delta_weight"):
        raise UserError(
            "model.lora.targets contains the output head, whose adapter the learner cannot train: remove the output head "
            "from it."
        )
    bias = getattr(layer, "bias", None)
    if model not in _scales:
        with eval_mode(model):
            _scales[model] = _scale_and_cap(model, Head(layer.weight, bias, 1.0))
    scale, softcap = _scales[model]
    return Head(layer.weight, bias, scale, logits_dtype(model, layer.weight.dtype), softcap)


def set_head_dtype(model: PreTrainedModel, name: str) -> None:
    """Set the dtype of the model's logits in sampler and learner. A copy of the model keeps it."""
    dtype = getattr(torch, name)
    if torch.promote_types(dtype, model.dtype) != dtype:
        raise UserError(
            f"model.head_dtype = {name} is narrower than the model's dtype {str(model.dtype).removeprefix('torch.')}: set "
            f"model.head_dtype = float32, or model.dtype = {name}."
        )
    model.__dict__[HEAD_DTYPE] = dtype


def logits_dtype(model: PreTrainedModel, weights: torch.dtype) -> torch.dtype:
    """Return the dtype of the logits: float32 unless `set_head_dtype` chose another, and never narrower than the weights."""
    return torch.promote_types(model.__dict__.get(HEAD_DTYPE, torch.float32), weights)


def next_logits(
    model: PreTrainedModel, tokens_BT: Tensor, positions_BT: Tensor, view: AttentionView, keep: Tensor | int
) -> Tensor:
    """Return the logits [B, n, V] of the tokens in `keep`, in the dtype of `logits_dtype`. The model's own forward would round
    them to the dtype of its weights."""
    if logits_dtype(model, model.dtype) == model.dtype:
        return run(model, tokens_BT, positions_BT, view, keep)
    head = head_of(model)
    hidden_BTD = decoder_output(model, tokens_BT, positions_BT, view)
    hidden_BnD = hidden_BTD[:, -keep:] if isinstance(keep, int) else hidden_BTD[:, keep]
    return head(hidden_BnD.flatten(0, 1)).unflatten(0, hidden_BnD.shape[:2])


def copy_support(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Copy the limits, head scale and head dtype of another model that computes the same function. The limits then hold for
    any dtype of the weights."""
    model.set_attn_implementation(NAME)
    _prepared[model] = replace(prepare(other), any_dtype=True)
    head = head_of(other)
    _scales[model] = (head.scale, head.softcap)
    if HEAD_DTYPE in other.__dict__:
        model.__dict__[HEAD_DTYPE] = other.__dict__[HEAD_DTYPE]


# Attention checks


def _refuse_by_config(model: PreTrainedModel, config, kind: str) -> None:
    if model.config.is_encoder_decoder:
        raise UserError(
            f"{kind} is an encoder-decoder model, which is not supported: use a decoder-only causal language model."
        )


def _refuse_by_layers(model: PreTrainedModel, config, kind: str) -> None:
    """Raise if a layer mixes tokens neither by attention nor in a recurrent layer that is supported."""
    recurrent = {layer_of(module) for module in mixers(model)}
    for layer, name in enumerate(getattr(config, "layer_types", None) or ()):
        if name not in KNOWN_LAYERS | TOKENWISE_LAYERS and layer not in recurrent:
            modules = [type(module).__name__ for module in model.modules() if getattr(module, "layer_idx", None) == layer]
            raise _unknown_layer(kind, f"layer {layer} of type {name}{f' ({modules[0]})' if modules else ''}")


def _refuse_unseen_layers(model: PreTrainedModel, config, kind: str, probe: "_Probe") -> None:
    """Raise if the configuration does not name the types of its layers, and one of them reached the probe neither by attention
    nor as a recurrent layer."""
    layers = decoder_layers(model)
    unseen = set(range(len(layers))) - set(probe.layers) - {state.layer for state in probe.states}
    if getattr(config, "layer_types", None) or not (unseen and probe.layers):
        return
    layer, known = min(unseen), {type(module) for module in layers[probe.layers[0]].modules()}
    own = [type(module).__name__ for module in layers[layer].modules() if type(module) not in known]
    raise _unknown_layer(kind, f"layer {layer} without attention{f' ({own[0]})' if own else ''}")


def _unknown_layer(kind: str, layer: str) -> UserError:
    return UserError(
        f"{kind} has {layer}, which is not supported: attention is, and the recurrent layers of {FAMILIES}. Use another model."
    )


def _failure(model: PreTrainedModel, kind: str, error: Exception) -> str:
    """Return a sentence about a pass that failed. If transformers alone fails too, our attention is not the reason."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad(), eval_mode(model):
            model(token, use_cache=False)
    except Exception as own:
        return f"{kind} does not run in transformers ({first_line(own)}): correct its config.json, or use another model."
    return f"{kind} does not run with sparse-rl's attention ({first_line(error)}): use another model."


def _context(config) -> int | None:
    names = ("max_position_embeddings", "rope_parameters", "original_max_position_embeddings")
    return context_length(*(getattr(config, name, None) for name in names))


class _Lookups(TorchFunctionMode):
    """Record the rows that single tokens read from tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, tuple[int, list[int]]] = {}
        """Number of rows of each table, by its address, and the rows read."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.embedding and args[0].numel() == 1 and not args[0].is_meta:
            index, weight = args[:2]
            self.tables.setdefault(weight.data_ptr(), (len(weight), []))[1].append(int(index))
        return func(*args, **(kwargs or {}))


def _positions(model: PreTrainedModel, config, context: int | None, lookups: _Lookups) -> int | None:
    """Return the number of positions that exist; None if any position does.

    A table is an embedding that read another row for position 1 than for position 0, or a buffer with a row for every token of
    the context and at most `SPARE_ROWS` more, or any number if its name is that of a table.
    """
    found = [rows - read[0] for rows, read in lookups.tables.values() if len(read) == 2 and read[0] != read[1]]
    if context is not None:
        for path, buffer in model.named_buffers():
            named = any(word in path.rsplit(".", 1)[-1] for word in ("pos", "cos", "sin"))
            if buffer.dim() == 2 and context <= len(buffer) and (named or len(buffer) <= context + SPARE_ROWS):
                found.append(len(buffer))
        found += [context] if changes_with_length(getattr(config, "rope_parameters", None)) else []
    return min(found, default=None)


def _windows_of_the_mask(config, shape: CacheShape) -> list[int]:
    """Return the windows that some models apply only through the mask, and do not pass to attention."""
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * shape.layers
    layers = [layer for layer in shape.full_layers if layer < len(layer_types)]
    local = {layer_types[layer] for layer in layers} - {"full_attention", "hybrid"}
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return [size for size in sizes if size] if local else []


@dataclass
class _Probe(AttentionProbe):
    """View that records attention shapes and windows while one token passes through every layer."""

    layers: list[int] = field(default_factory=list)
    shapes: set[tuple] = field(default_factory=set)
    """Heads and dimensions of the layers whose attention sees all tokens."""
    local_shapes: set[tuple] = field(default_factory=set)
    """The same of windowed layers."""
    windows: dict[int, int] = field(default_factory=dict)
    """Sliding window of each layer that has one."""
    plain: bool = True
    keys: dict[int, Tensor] = field(default_factory=dict)
    """Keys of the layers so far."""
    readers: list[tuple[int, int]] = field(default_factory=list)
    last: Tensor | None = None
    states: list[LayerState] = field(default_factory=list)

    def record_call(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
            raise UserError(
                f"{type(module).__name__} is not causal (is_causal = False): it attends to later tokens, so it cannot "
                "sample. Use a causal language model, or set is_decoder if its config.json has that key."
            )
        window, layer = kwargs.get("sliding_window"), cast(int, module.layer_idx)
        source = next((earlier for earlier, keys in self.keys.items() if keys is key), None)
        self.keys[layer] = key
        shapes = self.local_shapes if window else self.shapes
        shapes.add((query.shape[1], key.shape[1], query.shape[-1], key.shape[-1], value.shape[-1]))
        if source is not None and self.windows.get(source) != (window or None):
            raise UserError(
                f"{type(module).__name__} of layer {layer} reads the keys of layer {source}, whose window differs, which is not "
                "supported: use another model."
            )
        if source is not None:
            self.readers.append((layer, source))
        elif window:
            self.windows[layer] = window
        self.last = key

    def attend(self, layer, queries_BQTD, keys_BHTD, values_BHTD, scale, mask, form=PLAIN):
        self.layers.append(layer)
        self.plain = self.plain and form.is_plain
        return attend_to_itself(queries_BQTD, values_BHTD)

    def recur(self, layer: int, mixer: Mixer, hidden_BTD: Tensor) -> Tensor:
        out_BTD, states = mixer.start(hidden_BTD)
        self.states += [LayerState(layer, name, tuple(each.shape[1:]), each.dtype) for name, each in states.items()]
        return out_BTD

    def shape(self, kind: str, config) -> CacheShape:
        layers, types = config.num_hidden_layers, getattr(config, "layer_types", None) or ()
        if self.last is None:
            raise UserError(f"{kind} does not use transformers' attention interface: use a model that does.")
        full, local = _heads(kind, self.shapes), _heads(kind, self.local_shapes)
        free = {state.layer for state in self.states} - set(self.layers)
        free |= {layer for layer, name in enumerate(types) if name in TOKENWISE_LAYERS}
        if sorted([*self.layers, *free]) != list(range(layers)):
            raise UserError(
                f"{kind} calls attention {len(self.layers)} times in {layers} layers, {len(free)} of them without attention, which "
                "is not supported: use another model."
            )
        sizes = sorted(set(self.windows.values()))
        if len(sizes) > 1:
            raise UserError(
                f"{kind} has layers with windows of {sizes[0]} and {sizes[-1]} tokens, but one size per model is supported: use "
                "another model."
            )
        heads = full or local
        assert heads is not None
        shape = CacheShape(
            *(layers, *heads, self.last.dtype, self.last.device),
            readers=tuple(self.readers),
            states=tuple(self.states),
            attention_free=tuple(sorted(free)),
        )
        if not sizes:
            return shape
        return replace(
            shape, window=sizes[0], windowed=tuple(sorted(self.windows)), windowed_heads=local if local != heads else None
        )


def _heads(kind: str, shapes: set[tuple]) -> tuple[int, int, int] | None:
    """Return (query heads, kv heads, head dimension) of layers of one kind of attention; None if there are none."""
    if not shapes:
        return None
    if len(shapes) > 1:
        raise UserError(
            f"{kind} has different head shapes in layers of one kind of attention, which is not supported: use another model."
        )
    ((q_heads, kv_heads, q_dim, k_dim, v_dim),) = shapes
    if not q_dim == k_dim == v_dim:
        raise UserError(
            f"{kind} has keys of {k_dim} and values of {v_dim} dimensions (MLA), which is not supported: use another model."
        )
    return q_heads, kv_heads, k_dim


# LM head checks


@torch.no_grad()
def _scale_and_cap(model: PreTrainedModel, head: Head) -> tuple[float, float | None]:
    """Return the factor between the model's logits and hidden states times LM head, and the soft cap of the logits.

    A second check uses hidden states so large that a soft cap on the logits changes them.
    """
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    prepare(model)
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    view, first = _OneToken(), torch.zeros(1, dtype=torch.long, device=model.device)
    position = torch.zeros_like(token)
    own_V = run(model, token, position, view, keep=1)[0, -1].float()
    hidden_1D = hidden_states(model, token, position, view, first)
    plain_V = head(hidden_1D)[0].float()
    if not bool(own_V.isfinite().all()):
        raise UserError("The model's logits are not finite, so its weights are broken: use an earlier checkpoint.")
    linear_V, of_V = own_V, plain_V
    if softcap is not None:  # near the cap, rounding says nothing about the scale
        of_V = plain_V[own_V.abs() < 0.9 * softcap]
        linear_V = softcap * torch.atanh(own_V[own_V.abs() < 0.9 * softcap] / softcap)
    scale = float(linear_V @ of_V / (of_V @ of_V)) if len(of_V) else 1.0
    scale = 1.0 if abs(scale - 1) < 1e-3 else scale
    factor = 2.0 ** math.ceil(math.log2(LARGE_LOGIT / max(float(own_V.abs().max()), 1e-6)))
    with _scaled_input(model.get_output_embeddings(), factor):
        large_V = run(model, token, position, view, keep=1)[0, -1].float()
    scaled_V = head(hidden_1D * factor)[0].float()
    for own, plain in ((own_V, plain_V), (large_V, scaled_V)):
        expected = capped(scale * plain, softcap)
        if not torch.allclose(own, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())):
            raise UserError(
                f"{type(model).__name__} post-processes its logits. The learner's chunked log-probs support only the product of "
                "hidden states and LM head, scaled or soft-capped: use another model."
            )
    return scale, softcap


@contextmanager
def _scaled_input(layer: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the layer's input by `factor` inside the block."""
    hook = layer.register_forward_pre_hook(lambda module, args: (args[0] * factor, *args[1:]))
    try:
        yield
    finally:
        hook.remove()


class _OneToken:
    """View for a single token, which attends only to itself."""

    def attend(self, layer, queries_BQTD, keys_BHTD, values_BHTD, scale, mask, form=PLAIN):
        return attend_to_itself(queries_BQTD, values_BHTD)

    def recur(self, layer: int, mixer: Mixer, hidden_BTD: Tensor) -> Tensor:
        return mixer(hidden_BTD)
