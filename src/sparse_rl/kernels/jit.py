"""Triton where it is installed. Without it the modules beside this one still import, and their torch references serve."""

import contextlib
import functools

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton = tl = None

    def jit(function):
        return function


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why kernels do not run on this CUDA device, None if they do: tried once, with one that does nothing."""
    if triton is None:
        return "Triton is not installed; try pip install triton"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its compute capability is below 8.0"
    try:
        with torch.cuda.device(device):
            _nothing[(1,)](torch.zeros(1, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()
        return f"Triton cannot compile for it: {reason[0] if reason else type(error).__name__}"
    return None


@jit
def _nothing(pointer):
    tl.store(pointer, 1.0)


def usable(device: torch.device) -> bool:
    return device.type == "cuda" and why_not(device) is None


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels launch on the current device: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def precision(tensor: torch.Tensor) -> str:
    """Of products: exact for float32, never TF32. Triton's interpreter multiplies bfloat16 only after widening it."""
    if tensor.device.type == "cpu":
        return "wide"
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


@jit
def product(left, right, PRECISION: "tl.constexpr"):
    """left @ right, summed in float32."""
    if PRECISION == "wide":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=PRECISION)
