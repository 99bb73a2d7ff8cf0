"""GPU memory that torch can use in this process, and page-locked host memory for fast copies to and from a GPU."""

import contextlib
import weakref

import torch
from torch import Tensor
from torch import device as Device


def room_bytes(device: Device) -> int:
    """Return the total bytes that torch can hold on this GPU.

    The total is the free memory plus the memory that torch has reserved, limited to this process's memory fraction.
    """
    device = with_index(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed = total * torch.cuda.get_per_process_memory_fraction(device)
    return int(min(free + torch.cuda.memory_reserved(device), allowed))


def free_bytes(device: Device) -> int:
    """Return the bytes that torch can still allocate on this GPU, including reserved memory that is not in use."""
    return max(0, room_bytes(device) - torch.cuda.memory_allocated(device))


def page_lock(tensor: Tensor) -> None:
    """Page-lock the memory of a host tensor, if CUDA allows it.

    torch's own allocator of page-locked memory would round the size up to a power of two.
    """
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(cudart.cudaHostRegister(address, tensor.nbytes, 0)) == 0:
        weakref.finalize(tensor, cudart.cudaHostUnregister, address)
        return
    with contextlib.suppress(RuntimeError):  # CUDA reports the failure again at the next kernel: let that be this one
        torch.zeros(1, device="cuda")


def with_index(device: Device) -> Device:
    """Return the device with an explicit index, which parts of torch.cuda require. "cuda" becomes the current GPU."""
    return device if device.index is not None else Device(device.type, torch.cuda.current_device())
