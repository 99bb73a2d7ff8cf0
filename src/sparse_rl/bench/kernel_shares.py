"""Shares of GPU time by kind of kernel."""

from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile


def kernel_shares(run: Callable[[], None], kinds: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Return the share of each kind in the kernel time of `run`. A kind has words that occur in the names of its kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    times = dict.fromkeys((*kinds, "other"), 0.0)
    for event in profiler.key_averages():
        kernel = event.key.lower()
        kind = next((kind for kind, words in kinds.items() if any(word in kernel for word in words)), "other")
        times[kind] += event.self_device_time_total
    total = sum(times.values()) or 1.0
    return {kind: spent / total for kind, spent in times.items()}
