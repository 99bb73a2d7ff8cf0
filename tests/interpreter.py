"""Triton's interpreter without the search that takes most of its time, and with the padding of a GPU.

At every call of a device function, `tl.sum` for example, the interpreter searches all of `triton.language` for builtins to
replace. They are always the same ones, so their names are remembered here. What is replaced stays the same.

A masked load without `other` returns zeros here and anything on a GPU. `spoil_padding` makes it return NaN or a large integer, so
that a kernel that uses such padding fails its test.
"""

import functools
import inspect
from typing import Any

import numpy as np

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


def spoil_padding() -> None:
    if tl is None:
        return
    load = interpreter.InterpreterBuilder.create_masked_load

    def spoiled(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        if other is None:
            element = ptrs.get_element_ty()
            dtype = interpreter._get_np_dtype(element)
            worst = np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max
            if element.is_bf16():  # numpy has none, so the interpreter holds its bits
                worst = 0x7FC0
            other = interpreter.TensorHandle(np.full_like(ptrs.data, worst, dtype=dtype), element)
        return load(self, ptrs, mask, other, *rest)

    interpreter.InterpreterBuilder.create_masked_load = spoiled
