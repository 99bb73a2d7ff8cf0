"""Read the dimensions of a model without formulas from the model itself, built from its config.json on the meta device.

Imports torch and transformers, which takes seconds. Weights, keys, windows and recurrent states are exact.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from ..errors import UserError, first_line
from ..models.actor import linear_names
from ..models.compile import decoder_layers
from ..models.folder import needs_newer_transformers, unknown_layer
from ..models.support import prepare
from .dimensions import Dimensions, Linear, Weights
from .families import Family

NORM_COPIES = (8, 4)
"""`Family.norm_copies` of the norm in `FAMILIES` that saves most."""


def from_model(config: dict[str, Any], name: str) -> Dimensions:
    """Return the dimensions of the model that transformers builds from this config.json."""
    with quiet():
        model = without_values(config, name)
        limits = prepare(model)
    layers = decoder_layers(model)
    if not layers:
        raise UserError(f"{name} cannot be planned: the layers of {type(model).__name__} were not found.")
    shape, text = limits.shape, model.config.get_text_config()
    routed = [weight for layer in layers for weight in routed_weights(layer)]
    experts = len(routed[0]) if routed else 0
    chosen = getattr(text, "num_experts_per_tok", None) or experts  # some families list them, by layer
    active = min(chosen if isinstance(chosen, int) else max(chosen), experts)
    states = {state.layer: [0, 0] for state in shape.states}
    for state in shape.states:
        states[state.layer][state.dtype != shape.dtype] += state.nbytes // state.dtype.itemsize
    weights, inner_norms = weights_of(model, routed), any(map(has_inner_norms, layers))
    return Dimensions(
        layers=shape.layers,
        hidden=text.hidden_size,
        intermediate=max(each.inputs for each in weights.linears if each.outputs == text.hidden_size),
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=limits.vocab,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        context=min((each for each in (limits.context, limits.sliding_window) if each), default=None),
        window=shape.window,
        windowed=shape.windowed,
        windowed_heads=shape.windowed_heads,
        readers=shape.readers,
        attention_free=shape.attention_free,
        states=tuple((own, in_float32) for own, in_float32 in states.values()),
        experts=experts,
        active_experts=active if experts else 1,
        softcap=not limits.plain,
        family=Family(max(map(norms_of, layers)), norm_copies=NORM_COPIES, qk_norm="head" if inner_norms else ""),
        model=type(model).__name__,
        counted=weights,
        estimated_width=max(width_of(layer, active) for layer in layers) if routed or states or shape.windowed_heads else 0,
    )


def without_values(config: dict[str, Any], name: str) -> PreTrainedModel:
    """Return the model of a config.json on the meta device. No weights are allocated."""
    kind = config.get("model_type") or "of no model_type"
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{name} is {kind}, which plan does not support: use a model type of transformers.")
    try:
        with TemporaryDirectory() as folder:  # a file, because transformers reads values such as infinity only from one
            Path(folder, "config.json").write_text(json.dumps(config))
            read = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):  # experts computed in one batch need no values to know their tokens
            return AutoModelForCausalLM.from_config(
                read, dtype=torch.bfloat16, experts_implementation="batched_mm", trust_remote_code=False
            )
    except Exception as error:  # values of config.json can cause errors anywhere in the model code
        if layer := unknown_layer(config):
            raise needs_newer_transformers(name, layer) from error
        raise UserError(
            f"{name} cannot be planned: transformers cannot build a causal language model from its config.json "
            f"({first_line(error)}). Correct the file, or use another model."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the messages of transformers inside the block. A run prints them."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def weights_of(model: PreTrainedModel, routed: list[Tensor]) -> Weights:
    layers, head = decoder_layers(model), model.get_output_embeddings()
    modules = {path: each for path, each in model.named_modules() if is_linear(each) and each is not head}
    adapted = linear_names(model)
    linears = Counter(
        Linear(path.rpartition(".")[2], *widths(each), 1, adapted == "all-linear" or path in adapted)
        for path, each in modules.items()
    )
    layer_params = [count(layer.parameters()) for layer in layers]
    return Weights(
        params=count(model.parameters()),
        in_layers=sum(layer_params),
        largest_layer=max(layer_params),
        largest_weight=max(weight.numel() for weight in model.parameters()),
        embedding=model.get_input_embeddings().weight.numel(),
        routed=count(routed),
        quantised=sum(each.weight.numel() for layer in layers for each in layer.modules() if type(each) is nn.Linear),
        linears=tuple(replace(linear, count=number) for linear, number in linears.items()),
    )


def count(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def widths(linear: Any) -> tuple[int, int]:
    """Return (input width, output width) of a linear layer."""
    return (linear.nx, linear.nf) if isinstance(linear, Conv1D) else (linear.in_features, linear.out_features)


def routed_weights(layer: nn.Module) -> list[Tensor]:
    """Return the weights of a layer that hold one matrix or bias per expert."""
    stacks = [module for module in layer.modules() if any(each.dim() == 3 for each in module.parameters(recurse=False))]
    return [each for module in stacks if not isinstance(module, nn.Conv1d) for each in module.parameters(recurse=False)]


def width_of(layer: nn.Module, active_experts: int) -> int:
    """Return the sum of input and output widths of the linear layers of a layer and of the experts that a token uses."""
    linear_widths = sum(sum(widths(module)) for module in layer.modules() if is_linear(module))
    return linear_widths + active_experts * sum(sum(each.shape[1:]) for each in routed_weights(layer) if each.dim() == 3)


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def norms_of(layer: nn.Module) -> int:
    """Return the number of norms of the hidden states. Norms of queries, keys or states are inside other modules."""
    return sum(map(is_norm, layer.children()))


def has_inner_norms(layer: nn.Module) -> bool:
    return sum(map(is_norm, layer.modules())) > norms_of(layer)
