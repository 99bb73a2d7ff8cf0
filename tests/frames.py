"""A call whose frames, and those of all calls within, lie in one piece of memory.

CPython maps memory for frames in chunks of 16 KiB, and 3.11 and 3.12 unmap a chunk when its first frame ends. A function that is
called again and again where a chunk is full then costs two system calls and page faults each time (python/cpython#142183). Which
function that is depends on the depth at which pytest calls a test. Kernels in Triton's interpreter took twice as long.
"""

from collections.abc import Callable
from typing import Any


def in_one_chunk(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    return call(*given, **options)


in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=2**16)
"""Half a MiB, for which CPython maps one MiB: the other half is for the frames of what is called."""
