"""Check whether a model can run and gives correct results. There are three checks, each run once per model.

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
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..errors import UserError, first_line
from ..kernels.form import capped
from ..kv.shape import CacheShape
from .attention import NAME, AttentionView, eval_mode, run
from .compile import decoder_layers
from .folder import changes_with_length, context_length
from .head import Head, decoder_output, hidden_states
from .probe import TOKENWISE_LAYERS, ModelProbe, OneToken
from .recurrent import FAMILIES, bind, layer_of, mixers

KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Supported entries of layer_types for attention layers."""
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
    """Shortest window or chunk that layers apply only through the mask, which our views ignore. Longer sequences are refused."""
    vocab: int
    plain: bool = True
    """True if attention has no soft caps and no learned sinks."""
    any_dtype: bool = False
    """True if the limits hold for any dtype of the weights, which a sharded model changes between passes."""


_prepared: WeakKeyDictionary[PreTrainedModel, AttentionLimits] = WeakKeyDictionary()
_scales: WeakKeyDictionary[PreTrainedModel, tuple[float, float | None]] = WeakKeyDictionary()
"""Scale and soft cap of each model's logits."""


def prepare(model: PreTrainedModel) -> AttentionLimits:
    """Switch the model to our attention, and check with one token whether its attention is supported.

    Runs once per model, and again if its attention implementation, dtype or device has changed. On the meta device, tables of
    positions are not found.
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
    probe = ModelProbe()
    try:
        model.set_attn_implementation(NAME)
        with torch.no_grad(), eval_mode(model), _Lookups() as lookups:
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            run(model, token, token, probe, keep=1)
            if not token.is_meta:
                run(model, token, token + 1, OneToken(), keep=1)
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


def _refuse_unseen_layers(model: PreTrainedModel, config, kind: str, probe: ModelProbe) -> None:
    """Raise if the configuration lists no layer types, and the probe saw a layer without attention or recurrent state."""
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
    """Return a sentence about a pass that failed. If transformers fails too, our attention is not the reason."""
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
    the context and at most `SPARE_ROWS` more, or any number more if it is named like a table.
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


# LM head checks


@torch.no_grad()
def _scale_and_cap(model: PreTrainedModel, head: Head) -> tuple[float, float | None]:
    """Return the factor between the model's logits and hidden states times LM head, and the soft cap of the logits.

    A second check uses hidden states so large that a soft cap on the logits changes them.
    """
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    prepare(model)
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    view, first = OneToken(), torch.zeros(1, dtype=torch.long, device=model.device)
    position = torch.zeros_like(token)
    own_V = run(model, token, position, view, keep=1)[0, -1].float()
    hidden_1D = hidden_states(model, token, position, view, first)
    plain_V = head(hidden_1D)[0].float()
    if not bool(own_V.isfinite().all()):
        raise UserError("The model's logits are not finite, so its weights are broken: use an earlier checkpoint.")
    uncapped_V, unscaled_V = own_V, plain_V
    if softcap is not None:  # near the cap, rounding hides the scale
        is_inner_V = own_V.abs() < 0.9 * softcap
        uncapped_V, unscaled_V = softcap * torch.atanh(own_V[is_inner_V] / softcap), plain_V[is_inner_V]
    scale = float(uncapped_V @ unscaled_V / (unscaled_V @ unscaled_V)) if len(unscaled_V) else 1.0
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
