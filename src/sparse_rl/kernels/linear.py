"""Multiply a few rows by a large weight on a CPU whose BLAS repacks the weight for every product.

OpenBLAS (the ARM builds of torch) computes y = x W^T for 16 rows at about two thirds of its speed for W x^T. Both are the same
product with the operands swapped. MKL does not need this workaround, and a single row is already a matrix-vector product.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ROWS = range(2, 49)
LARGE_WEIGHT = 2**16  # elements; for smaller weights the workaround costs more than it saves


class SkinnyLinear(TorchFunctionMode):
    """Context in which `linear` computes W x^T for few float32 rows and a large weight. Models need no change."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs and _skinny(*args[:2]):
            return skinny_linear(*args)
        return func(*args, **(kwargs or {}))


def skinny_linear(x, weight, bias=None):
    rows = x.reshape(-1, x.shape[-1])
    out = (weight @ rows.t()).t().contiguous().view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def _skinny(x, weight) -> bool:
    return x.dtype == torch.float32 and x.numel() // x.shape[-1] in ROWS and weight.numel() >= LARGE_WEIGHT


def decode_context(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    """Return the context in which this model's decode steps run."""
    weights = [weight for weight in model.parameters() if weight.device.type == "cpu" and weight.numel() >= LARGE_WEIGHT]
    if weights and not torch.backends.mkl.is_available():
        return SkinnyLinear()
    return contextlib.nullcontext()
