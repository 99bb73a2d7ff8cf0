"""Compile elementwise operations into few kernels on a GPU; elsewhere, or if that fails, run them as they are.

Only pieces without attention are compiled, each once for all layers and lengths. That takes seconds, and the view alone
decides how attention is computed.
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
    """Return `function(*tensors)`, compiled on a GPU for any number of rows. If that is not possible, return
    `plain(*tensors)`."""
    plain = plain or function
    return _compiled_or_plain(function, plain, tensors, rows=0) if fuses(tensors[0].device) else plain(*tensors)


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """Compile the norms and MLPs of a large model on a GPU inside the block, as far as they are functions of one tensor.

    All passes of the learner run inside it, including backward, so that equal weights give equal log-probs in all of them.
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
    """Return whether a module is a norm or MLP, by transformers' class names. A module whose forward is already replaced is
    not touched."""
    return type(module).__name__.endswith(("RMSNorm", "MLP")) and "forward" not in module.__dict__


class _Fused:
    """Forward of a module, compiled once for all modules of its class."""

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
    except compiler_errors() as error:  # nothing else: checkpointing stops a forward early with its own exception
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
