"""Views that run one token through a model. `ModelProbe` records the shapes of attention, windows and recurrent states. It raises
if a slot cache cannot hold them."""

# B rows, Q query heads, H kv heads, T tokens, D head dimension (hidden dimension in recurrent layers)

from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from ..errors import UserError
from ..format import counted
from ..kernels.form import PLAIN
from ..kv.shape import CacheShape, LayerState
from .attention import AttentionProbe, attend_to_itself
from .recurrent import Mixer

TOKENWISE_LAYERS = {"mlp", "moe"}
"""Entries of layer_types that do not mix tokens."""


class OneToken:
    """View for a single token, which attends only to itself."""

    def attend(self, layer, queries_BQTD, keys_BHTD, values_BHTD, scale, mask, form=PLAIN):
        return attend_to_itself(queries_BQTD, values_BHTD)

    def recur(self, layer: int, mixer: Mixer, hidden_BTD: Tensor) -> Tensor:
        return mixer(hidden_BTD)


@dataclass
class ModelProbe(AttentionProbe):
    """View that records attention shapes and windows while one token passes through every layer."""

    layers: list[int] = field(default_factory=list)
    shapes: set[tuple] = field(default_factory=set)
    """Heads and dimensions of the layers whose attention sees all tokens."""
    local_shapes: set[tuple] = field(default_factory=set)
    """Heads and dimensions of windowed layers."""
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
                f"{kind} calls attention {counted(len(self.layers), 'time')} in {counted(layers, 'layer')}, {len(free)} of them "
                "without attention, which is not supported: use another model."
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
