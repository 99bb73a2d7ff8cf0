"""Elementwise work in few kernels on a GPU: compiled by torch where it can be, as it stands elsewhere.

Only pieces without attention are compiled, each once for all layers and lengths. That takes seconds, and how attention is
computed stays the view's own business.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..config import WORTH_COMPILING
from ..errors import first_line


def fuses(device: torch.device) -> bool:
    return device.type == "cuda" and not _broken


_broken: list[Exception] = []


def fused(function: Callable[..., Any], *tensors: Tensor, plain: Callable[..., Any] | None = None) -> Any:
    """`function(*tensors)`, on a GPU compiled for any number of rows; where that cannot be, `plain` in its place."""
    plain = plain or function
    return _compiled_or_plain(function, plain, tensors, rows=0) if fuses(tensors[0].device) else plain(*tensors)


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """Inside it the norms and MLPs of a large model on a GPU are compiled, as far as they are functions of one tensor.

    All passes of the learner run inside it, backward with them, so that equal weights give equal log-probs in all of them.
    """
    pieces = [module for module in model.modules() if _elementwise(module)] if _worth_compiling(model) else []
    for piece in pieces:
        piece.forward = _Fused(piece)
    try:
        yield
    finally:
        for piece in pieces:
            piece.__dict__.pop("forward", None)


def _worth_compiling(model: nn.Module) -> bool:
    weights = list(model.parameters())
    return fuses(weights[0].device) and sum(weight.numel() for weight in weights) >= WORTH_COMPILING


def _elementwise(module: nn.Module) -> bool:
    """By name, as transformers names them; one whose forward is already someone else's is left alone."""
    return type(module).__name__.endswith(("RMSNorm", "MLP")) and "forward" not in module.__dict__


class _Fused:
    """The forward of a module, compiled once for all modules of its class."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Tensor, **kwargs: Any) -> Tensor:
        plain = type(self.module).forward
        if kwargs or len(args) != 1 or not fuses(args[0].device):
            return plain(self.module, *args, **kwargs)
        return _compiled_or_plain(plain, plain, (self.module, args[0]), rows=1)


def _compiled_or_plain(function: Callable[..., Any], plain: Callable[..., Any], args: tuple[Any, ...], rows: int) -> Any:
    for arg in args:
        if isinstance(arg, Tensor):
            torch._dynamo.maybe_mark_dynamic(arg, rows)
    try:
        return _compiled(function)(*args)
    except compiler_errors() as error:  # nothing else: checkpointing stops a forward early by an exception of its own
        _give_up(error)
        return plain(*args)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def compiler_errors() -> type[Exception]:
    return torch._dynamo.exc.TorchDynamoException


def _give_up(error: Exception) -> None:
    warnings.warn(
        f"torch.compile does not run here, so the learner is slower ({type(error).__name__}: {first_line(error)}).",
        stacklevel=4,
    )
    _broken.append(error)
