"""Build a small float32 stand-in for a model: one decoder layer of each kind and the first rows of the vocabulary.

Its layers compute the same as the model's. It shares float32 weights with the model, and takes less memory than one more layer of
each kind.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .compile import layer_list
from .four_bit import compute_in_float32

ROWS = 1024
"""Maximum number of vocabulary rows."""
PER_LAYER_TABLE, PER_LAYER_PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
"""Modules of Gemma 3n and Gemma 4 whose outputs are one input for every layer, side by side."""
SOURCE = "kv_shared_layer_index"
"""Setting of Gemma 3n's attention: the layer whose keys it reads."""


def reduced(model: PreTrainedModel) -> PreTrainedModel:
    """Return the stand-in. Raises an arbitrary exception if the model's modules cannot be separated."""
    layers = layer_list(model)
    if layers is None:
        raise ValueError("the decoder's layers were not found")
    numbered = _numbered(layers)
    kept = sorted(set(_first_of_kind(layers, model.config.get_text_config(), numbered)))
    memo: dict[int, Any] = {id(layers): nn.ModuleList()}
    _share_per_layer(model, kept, len(layers), memo)
    _share_in_float32(model, layers, [layers[index] for index in kept], memo)
    small = copy.deepcopy(model, memo)
    vars(small).pop("forward", None)  # a trainer may wrap the forward of an instance; the copied wrapper calls the original
    for module in small.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it may exceed the number of rows, and only gradients use it
    memo[id(layers)].extend(copy.deepcopy(layers[index], memo) for index in kept)
    _renumber(small, memo[id(layers)], kept, len(layers), numbered)
    compute_in_float32(small)
    return small.requires_grad_(False).eval()


def stand_ins(model: PreTrainedModel) -> list[int]:
    """Return, for every layer of the model, the index of the layer of `reduced(model)` that is of its kind."""
    layers = layer_list(model)
    assert layers is not None
    first = _first_of_kind(layers, model.config.get_text_config(), _numbered(layers))
    kept = sorted(set(first))
    return [kept.index(index) for index in first]


def _first_of_kind(layers: nn.ModuleList, config: Any, numbered: set[tuple[str, str]]) -> list[int]:
    """Return, for every layer, the index of the first layer of its kind. Layers are of one kind if their modules, shapes and
    settings agree, apart from layer indices."""
    first: dict[Any, int] = {}
    found = []
    per_layer = [values for _, values in _lists(config, len(layers))]
    for index, layer in enumerate(layers):
        modules = []
        for path, module in layer.named_modules():
            settings = [(name, value) for name, value in _settings(module) if (path, name) not in numbered]
            shapes = [(name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False)]
            modules.append((path, type(module), tuple(settings), tuple(shapes)))
        kind = (tuple(modules), tuple(repr(values[index]) for values in per_layer))
        found.append(first.setdefault(kind, index))
    return found


def _numbered(layers: nn.ModuleList) -> set[tuple[str, str]]:
    """Return the (module, attribute) pairs that hold the layer index in every layer that has the module, e.g. layer_idx."""
    held: dict[tuple[str, str], list[bool]] = {}
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for name, value in _settings(module):
                held.setdefault((path, name), []).append(type(value) is int and value == index)
    return {pair for pair, is_index in held.items() if all(is_index) and (len(is_index) > 1 or pair[1] == "layer_idx")}


def _settings(module: nn.Module) -> Iterator[tuple[str, bool | int | str | None]]:
    """Yield the settings of a module except floats, which may vary with depth and do not change the structure."""
    for name, value in vars(module).items():
        if value is None or type(value) in (bool, int, str):
            yield name, value


def _lists(config: Any, layers: int) -> list[tuple[str, list]]:
    """Return the configuration values that have one entry per layer, e.g. layer_types."""
    return [
        (name, list(value)) for name, value in vars(config).items() if type(value) in (list, tuple) and len(value) == layers
    ]


def _share_in_float32(model: PreTrainedModel, layers: nn.ModuleList, kept: list[nn.Module], memo: dict[int, Any]) -> None:
    dropped = {id(weight) for layer in layers for weight in layer.parameters()}
    dropped -= {id(weight) for layer in kept for weight in layer.parameters()}
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        for weight in embedding.parameters(recurse=False):
            memo[id(weight)] = nn.Parameter(_float32(weight[:ROWS]), requires_grad=False)
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in dropped and id(tensor) not in memo:
            memo[id(tensor)] = _float32(tensor)


def _share_per_layer(model: PreTrainedModel, kept: list[int], total: int, memo: dict[int, Any]) -> None:
    """Keep the parts of the kept layers in modules that compute an input for every layer, and the first rows of their table."""
    width = total * (getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None) or 0)
    for path, weight in model.named_parameters():
        names = path.split(".")  # the path may be inside an adapter
        if PER_LAYER_TABLE in names and weight.shape[1] == width:
            parts = weight[:ROWS].unflatten(1, (total, -1))[:, kept].flatten(1)
        elif PER_LAYER_PROJECTION in names and len(weight) == width:
            parts = weight.unflatten(0, (total, -1))[kept].flatten(0, 1)
        else:
            continue
        memo[id(weight)] = nn.Parameter(_float32(parts), requires_grad=False)


def _float32(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    return nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide


def _renumber(
    small: PreTrainedModel, layers: nn.ModuleList, kept: list[int], total: int, numbered: set[tuple[str, str]]
) -> None:
    if len(kept) == total:
        return
    config = small.config.get_text_config()
    for name, values in _lists(config, total):
        vars(config)[name] = [values[index] for index in kept]
    vars(config)[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    for number, layer in enumerate(layers):
        modules = dict(layer.named_modules())
        for path, name in numbered:
            if path in modules:
                setattr(modules[path], name, number)
        for module in modules.values():
            if (source := getattr(module, SOURCE, None)) is not None:
                setattr(module, SOURCE, kept.index(source))
