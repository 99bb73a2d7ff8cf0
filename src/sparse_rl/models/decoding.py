"""Make an unmodified transformers model fast to capture: compile its layers and fuse projections of one input.

Both hold only while a decode step is captured. The model's own modules are back in place afterwards. One change stays:
projections that share an input lie in one storage, and their parameters are views of it.
"""

# I inputs, O outputs of all projections of a group

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .attention import NAME, attention

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that read the same input, in the models that have them."""


class Product:
    """One product for a group of projections. It is held from the call of the first to that of the last."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None):
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self.input: Tensor | None = None
        self.result: Tensor | None = None


class SharedProjection(nn.Module):
    """The part of a group's product that belongs to one projection."""

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
    """Place the weights of each group one after the other in one storage. Values and parameter objects do not change."""
    for _, _, linears in _groups(model):
        if _shared([linear.weight for linear in linears]) is None:
            _lay_together([linear.weight for linear in linears])
        if linears[0].bias is not None and _shared([linear.bias for linear in linears]) is None:
            _lay_together([linear.bias for linear in linears])


@contextmanager
def decoding(model: PreTrainedModel, *, compile: bool) -> Iterator[None]:
    """Run layers compiled and groups as one product inside the block, if `compile` is set."""
    if not compile:
        yield
        return
    ours = [layer for layer in decoder_layers(model) if "forward" not in layer.__dict__]  # a replaced forward is left alone
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        AttentionInterface.register(NAME, torch.compiler.disable(attention))  # if traced, it would be compiled for every layer
        for layer in ours:
            layer.forward = functools.partial(_compiled(type(layer).forward), layer)
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
        for layer in ours:
            layer.__dict__.pop("forward", None)
        AttentionInterface.register(NAME, attention)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's blocks: all of one type, as many as in the configuration."""
    return list(layer_list(model) or [])


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the module that holds the decoder's blocks, or None."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return None


@functools.cache
def _compiled(forward: Callable) -> Callable:
    # Round where the model rounds: the learner's pass is not compiled, and the two should differ as little as possible.
    return torch.compile(forward, options={"emulate_precision_casts": True})


def _groups(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], list[nn.Linear]]]:
    """Yield each module that has such projections as plain linear layers, with their names and the layers."""
    for module in list(model.modules()):
        for names in GROUPS:
            linears = [getattr(module, name, None) for name in names]
            if all(type(linear) is nn.Linear for linear in linears) and len({_kind(linear) for linear in linears}) == 1:
                yield module, names, linears  # type: ignore[misc]


def _kind(linear) -> tuple:
    return linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None


def _lay_together(params: list[Tensor]) -> None:
    together = torch.cat([param.detach() for param in params])
    for param, part in zip(params, together.split([len(param) for param in params]), strict=True):
        param.data = part


def _shared(params: list[Tensor]) -> Tensor | None:
    """Return the tensor whose consecutive rows these are, or None."""
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
