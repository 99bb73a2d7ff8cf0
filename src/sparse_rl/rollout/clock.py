"""Measure time per phase without synchronizing the device: CUDA events on a GPU, the host clock on a CPU."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    def __init__(self, device: torch.device):
        self.device, self.started = device, time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self.device.type != "cuda":
            before = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - before
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        yield
        end.record(stream)
        self._events.append((name, start, end))

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self.started

    def seconds(self) -> dict[str, float]:
        """Return the accumulated seconds of each part. Synchronizes the device."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)


def device_time(device: torch.device) -> float:
    """Synchronize the device and return the host clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
