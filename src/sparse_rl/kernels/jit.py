"""Import Triton if it is installed. Without Triton, the kernel modules still import and use their torch references."""

import contextlib
import functools

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton = tl = None

    def jit(function=None, **options):
        return function or jit


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return why kernels do not run on this CUDA device, or None if they do. Launches an empty kernel once."""
    if triton is None:
        return "Triton is not installed: pip install triton"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    try:
        with torch.cuda.device(device):
            _nothing[(1,)](torch.zeros(1, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()
        return f"Triton cannot compile for this GPU: {reason[0] if reason else type(error).__name__}"
    return None


@jit
def _nothing(pointer):
    tl.store(pointer, 1.0)


def usable(device: torch.device) -> bool:
    return device.type == "cuda" and why_not(device) is None


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make this the current device, on which kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def precision(tensor: torch.Tensor) -> str:
    """Return the precision of matrix products: exact for float32, never TF32. Triton's interpreter requires bfloat16 to be
    widened first."""
    if tensor.device.type == "cpu":
        return "wide"
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


@jit
def product(left, right, PRECISION: "tl.constexpr"):
    """Return left @ right, summed in float32."""
    if PRECISION == "wide":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=PRECISION)
