"""Compile the layers of an unmodified transformers model on a GPU, for the learner and the sampler.

All layers and lengths share one compiled layer. Attention is not compiled, because it depends on the view. Compiled layers
round where eager mode rounds, so that sampler and learner stay close. On other devices, or if compilation fails, layers run in
eager mode.

The learner (`fused`, `fused_layers`) also compiles functions of logits. The sampler (`fuse_projections`, `decoding`) captures
a decode step, with one matrix product for all projections that share an input. The model's modules are restored afterwards. One
change remains: projections that share an input are stored in one tensor, and their parameters are views of it.
"""

# I inputs, O outputs of all projections of a group

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..config import WORTH_COMPILING
from ..errors import first_line
from .attention import NAME, attention

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that share an input, in the models that have them."""

COMPILATIONS = 64
"""Maximum number of compilations of a function. Sampler and learner compile a layer several times each: with and without
gradients, for one or for any length, for a model and for its adapters. Beyond the limit, torch runs it in eager mode."""

# Learner

_broken: list[Exception] = []


def fuses(device: torch.device) -> bool:
    """Return whether functions are compiled on this device: it is a GPU, and no compilation has failed yet."""
    return device.type == "cuda" and not _broken


def fused(function: Callable[..., Any], *tensors: Tensor, plain: Callable[..., Any] | None = None) -> Any:
    """Return `function(*tensors)`, compiled on a GPU for any number of rows, or `plain(*tensors)` if it cannot be compiled."""
    plain = plain or function
    if not fuses(tensors[0].device):
        return plain(*tensors)
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    try:
        return _compiled(function)(*tensors)
    except compiler_errors() as error:
        _give_up(error)
        return plain(*tensors)


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """Compile the layers and the final norm of a large model on a GPU inside the block.

    All learner passes, including backward, run inside this block, so that equal weights give equal log-probs in all passes.
    """
    if not _worth_compiling(model):
        yield
        return
    layers = decoder_layers(model)
    inside = {module for layer in layers for module in layer.modules()}
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm") and module not in inside]
    with _opaque_attention(), _replaced_forwards([*layers, *norms], _Fused):
        yield


def _worth_compiling(model: nn.Module) -> bool:
    weights = list(model.parameters())
    return fuses(weights[0].device) and sum(weight.numel() for weight in weights) >= WORTH_COMPILING


class _Fused:
    """Compiled forward of a module. It is compiled once for all modules of the same class and all lengths."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, hidden_1ND: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = type(self.module).forward
        if not fuses(hidden_1ND.device):
            return plain(self.module, hidden_1ND, *args, **kwargs)
        try:
            return _compiled(plain, rounds_like_eager=True, any_length=True)(self.module, hidden_1ND, *args, **kwargs)
        except compiler_errors() as error:  # only these: checkpointing ends a forward early with its own exception
            _give_up(error)
            return plain(self.module, hidden_1ND, *args, **kwargs)


def compiler_errors() -> type[Exception]:
    return torch._dynamo.exc.TorchDynamoException


def _give_up(error: Exception) -> None:
    warnings.warn(
        f"torch.compile is not available, so the learner is slower ({type(error).__name__}: {first_line(error)}).",
        stacklevel=4,
    )
    _broken.append(error)


# Sampler


class Product:
    """One matrix product for a group of projections. It keeps its result until the last projection of the group has read it."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None):
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self.input: Tensor | None = None
        self.result: Tensor | None = None


class SharedProjection(nn.Module):
    """Module that returns one projection's part of the group's product."""

    def __init__(self, product: Product, start: int, stop: int):
        super().__init__()
        self.product, self.start, self.stop = product, start, stop

    def forward(self, hidden: Tensor) -> Tensor:
        product = self.product
        if self.start == 0:
            product.input, product.result = hidden, F.linear(hidden, product.weight_OI, product.bias_O)
        assert product.result is not None, "the model calls its projections in another order"
        assert product.input is hidden, "the model's projections read different inputs"
        mine = product.result[..., self.start : self.stop]
        if self.stop == len(product.weight_OI):
            product.input = product.result = None
        return mine


@torch.no_grad()
def fuse_projections(model: nn.Module) -> None:
    """Store the weights of each group consecutively in one tensor. Values and parameter objects do not change."""
    for _, _, linears in _groups(model):
        if _shared([linear.weight for linear in linears]) is None:
            _make_contiguous([linear.weight for linear in linears])
        if linears[0].bias is not None and _shared([linear.bias for linear in linears]) is None:
            _make_contiguous([linear.bias for linear in linears])


@contextmanager
def decoding(model: PreTrainedModel, *, compile: bool) -> Iterator[None]:
    """If `compile` is set, run compiled layers and one product per group of projections inside the block."""
    if not compile:
        yield
        return
    with _opaque_attention(), _replaced_forwards(decoder_layers(model), _compiled_layer), _shared_products(model):
        yield


def _compiled_layer(layer: nn.Module) -> Callable[..., Any]:
    return partial(_compiled(type(layer).forward, rounds_like_eager=True), layer)


@contextmanager
def _shared_products(model: nn.Module) -> Iterator[None]:
    """Run each group of projections as one product inside the block, if its weights share one storage."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent, names, linears in _groups(model):
            weight = _shared([linear.weight for linear in linears])
            bias = _shared([linear.bias for linear in linears]) if linears[0].bias is not None else None
            if weight is None or (bias is None) != (linears[0].bias is None):
                continue
            product, start = Product(weight, bias), 0
            for name, linear in zip(names, linears, strict=True):
                replaced.append((parent, name, linear))
                setattr(parent, name, SharedProjection(product, start, start + linear.out_features))
                start += linear.out_features
        yield
    finally:
        for parent, name, original in replaced:
            setattr(parent, name, original)


def _groups(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], list[nn.Linear]]]:
    """Yield (module, projection names, projections) for each module whose grouped projections are plain linear layers."""
    for module in list(model.modules()):
        for names in GROUPS:
            linears = [getattr(module, name, None) for name in names]
            if all(type(linear) is nn.Linear for linear in linears) and len({_kind(linear) for linear in linears}) == 1:
                yield module, names, linears  # type: ignore[misc]


def _kind(linear) -> tuple:
    return linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None


def _make_contiguous(params: list[Tensor]) -> None:
    joined = torch.cat([param.detach() for param in params])
    for param, part in zip(params, joined.split([len(param) for param in params]), strict=True):
        param.data = part


def _shared(params: list[Tensor]) -> Tensor | None:
    """Return the tensor that holds these tensors as consecutive rows, or None."""
    first = params[0].detach()
    end = first.data_ptr()
    for param in params:
        if param.data_ptr() != end or not param.is_contiguous():
            return None
        end += param.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None
    rows = sum(len(param) for param in params)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


# Shared


@contextmanager
def _opaque_attention() -> Iterator[None]:
    """Keep the compiler out of attention inside the block. If traced, attention would be compiled for every layer."""
    try:
        AttentionInterface.register(NAME, torch.compiler.disable(attention))
        yield
    finally:
        AttentionInterface.register(NAME, attention)


@cache
def _compiled(
    function: Callable[..., Any], *, rounds_like_eager: bool = False, any_length: bool = False
) -> Callable[..., Any]:
    """Return the compiled function.

    `rounds_like_eager` rounds intermediate values where eager mode rounds them. `any_length` compiles once for all lengths. A
    decode step sets only the first. Small independent kernels, such as the rotations of queries and keys, then share a launch.
    """
    options: dict[str, Any] = {"emulate_precision_casts": True} if rounds_like_eager else {}
    if rounds_like_eager and not any_length:
        options["combo_kernels"] = True
    compiled = torch.compile(function, options=options, dynamic=True if any_length else None)

    def call(*args: Any, **kwargs: Any) -> Any:
        # a float that is not specialized would be an input in host memory
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS, specialize_float=True):
            return compiled(*args, **kwargs)

    return call


@contextmanager
def _replaced_forwards(modules: Iterable[nn.Module], forward: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward of each module by `forward(module)` inside the block. A forward that is already replaced is kept."""
    ours = [module for module in modules if "forward" not in module.__dict__]
    try:
        for module in ours:
            module.forward = forward(module)
        yield
    finally:
        for module in ours:
            module.__dict__.pop("forward", None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's layers. They all have one type, and their number matches the configuration."""
    return list(layer_list(model) or [])


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the module list that holds the decoder's layers, or None. It excludes the image layers of a multimodal model."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return None
