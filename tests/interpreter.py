"""Triton's interpreter without the search that takes most of its time.

At every call of a device function, `tl.sum` for example, the interpreter searches all of `triton.language` for builtins to
replace. They are always the same ones, so their names are remembered here. What is replaced stays the same.
"""

import functools
import inspect
from typing import Any

try:
    from triton import language as tl
    from triton.runtime import interpreter
except ImportError:  # kernels are not tested then
    tl = None


@functools.cache
def builtin_names(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def remember_builtins() -> None:
    if tl is None:
        return
    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtin_names(package)  # before the first replacement
    interpreter._patch_builtin = _patch_builtin


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in builtin_names(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)
