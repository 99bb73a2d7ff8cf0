"""Triton where it is installed. Without it the modules beside this one still import, and their torch references serve."""

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton = tl = None

    def jit(function):
        return function


def usable(device: torch.device) -> bool:
    """Whether kernels run on this device: a CUDA device that Triton compiles for."""
    return triton is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


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
