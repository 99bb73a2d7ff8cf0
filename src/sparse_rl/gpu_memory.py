"""Memory of a GPU that torch may use in this process."""

import torch
from torch import device as Device


def room_bytes(device: Device) -> int:
    """Return the bytes that torch may hold on this GPU.

    This is the free memory plus the memory torch has reserved, limited to the share this process may use.
    """
    device = with_index(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed = total * torch.cuda.get_per_process_memory_fraction(device)
    return int(min(free + torch.cuda.memory_reserved(device), allowed))


def free_bytes(device: Device) -> int:
    """Return the bytes that torch may still allocate on this GPU, including reserved memory that is not in use."""
    return max(0, room_bytes(device) - torch.cuda.memory_allocated(device))


def with_index(device: Device) -> Device:
    """Return the GPU with its index, which parts of torch.cuda need; "cuda" alone is the current GPU."""
    return device if device.index is not None else Device(device.type, torch.cuda.current_device())
