"""Triton's interpreter without the work that it repeats for every operation, and with the padding of a GPU.

- At every call of a device function, `tl.sum` for example, it searches all of `triton.language` for builtins and replaces them
  again. Here the replacements are made once, and a launch puts all of them in place.
- For every tensor, it checks the shape and makes new constants of it. Here equal shapes share them.
- For every sum and product of integers, it looks for an overflow, and does not use what it finds unless it is debugged.

A masked load without `other` returns zeros here and anything on a GPU. `spoil_padding` makes it return NaN or a large integer, so
that a kernel that uses such padding fails its test.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from triton import language as tl
    from triton.runtime import interpreter
except ImportError:  # kernels are not tested then
    tl = None


def make_faster() -> None:
    if tl is None:
        return
    _share_shapes()
    _remember_numpy_types()
    _replace_builtins_once()
    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflows are found"
    interpreter.interpreter_builder.options = type(options)(sanitize_overflow=False)


def _share_shapes() -> None:
    block_type_init = tl.block_type.__init__
    shapes: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    constants: dict[tuple[int, ...], tuple[Any, Any]] = {(): (tl.tuple([]), tl.constexpr(1))}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        if sizes not in shapes:
            block_type_init(self, element_ty, shape)  # checks the shape
            shapes[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = shapes[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in constants:
            constants[sizes] = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(type.numel)
        self.shape, self.numel = constants[sizes]

    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor


def _remember_numpy_types() -> None:
    numpy_type = interpreter._get_np_dtype
    names = [*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, *tl.dtype.FP_TYPES]
    of_name = {name: numpy_type(tl.dtype(name)) for name in names}
    of_pointer = numpy_type(tl.pointer_type(tl.int8))

    def remembered(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return of_pointer if isinstance(scalar, tl.pointer_type) else of_name[scalar.name]

    interpreter._get_np_dtype = remembered


def _replace_builtins_once() -> None:
    """Every launch replaces the same attributes by the same functions, whichever module the kernel has imported."""
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    replaced = [
        (place, name, _interpreted(member))
        for place in places
        for name, member in inspect.getmembers(place)
        if tl.core.is_builtin(member)
    ]
    nothing = interpreter._LangPatchScope()
    launched: list[Any] = []

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            launched.remove(self)

    def patch_lang(fn: Callable[..., Any]) -> Any:
        if launched:  # this is a call of a device function
            return nothing
        scope = Scope()
        launched.append(scope)
        for place, name, function in replaced:
            scope.set_attr(place, name, function)
        interpreter._patch_lang_tensor(tl.tensor, scope)
        for language in (tl, tl.core):
            interpreter._patch_lang_core(language, scope)
        return scope

    interpreter._patch_lang = patch_lang


def _interpreted(builtin: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(builtin, "__wrapped__", builtin)  # without the check that options are complete

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **options)

    return call


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
