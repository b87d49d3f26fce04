"""Triton's interpreter, with less done anew at each operation of a kernel."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def interpret_faster() -> None:
    """Find out once what is the same each time. What kernels compute stays as it is."""
    _put_language_once()
    _call_builtins_directly()
    _launch_quickly()
    _make_tensors_quickly()
    _check_equal_types_quickly()


def check_overflow(*, wanted: bool) -> None:
    """Whether each sum and product of integers is computed twice, to see that it fits."""
    options = interpreter.InterpreterOptions(sanitize_overflow=wanted)
    interpreter.interpreter_builder.options = options


def _put_language_once() -> None:
    """The interpreter's functions stay in the language's place, into which it puts them for each
    kernel, and looks for all of them again whenever a kernel calls a function."""
    put, scope = interpreter._patch_lang, interpreter._LangPatchScope
    replaced: set[types.ModuleType] = set()
    looked_at: set[types.CodeType] = set()

    def put_once(function: Callable[..., Any]) -> Any:
        if function.__code__ not in looked_at:
            looked_at.add(function.__code__)
            names = function.__globals__.values()
            seen = {value for value in names if type(value) is types.ModuleType}
            missing = ({tl, tl.core} & seen) - replaced
            replaced.update(missing)
            if missing:
                put(function)
        return scope()

    interpreter._patch_lang = put_once


def _call_builtins_directly() -> None:
    """A function of the language is given what interprets it, and nobody asks whether it was."""
    asking = tl.core.builtin(lambda _semantic: None).__code__
    put, semantic = interpreter._patch_attr, interpreter.interpreter_semantic

    def put_function(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not asking:
            put(owner, name, member, builder, scope)
            return
        function = member.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = put_function


def _launch_quickly() -> None:
    """The parameters of a function are found once."""
    read = types.SimpleNamespace(**vars(inspect))
    read.getfullargspec = cache(inspect.getfullargspec)
    read.get_annotations = cache(inspect.get_annotations)
    interpreter.inspect = read


def _make_tensors_quickly() -> None:
    """What follows from a type or a shape is found once for it."""
    of_a_scalar, of_any = cache(interpreter._get_np_dtype), interpreter._get_np_dtype
    unwrap, no_sizes = tl.core._unwrap_if_constexpr, (tl.constexpr(1), tl.tuple([]))
    make_type, check_size = tl.block_type.__init__, interpreter.TensorHandle.__post_init__
    equal, policy = tl.dtype.__eq__, cache(tl.core._normalize_cache_policy)
    of_shapes: dict[tuple[int, ...], dict[str, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = of_shapes.get(tuple(shape))
        if known is None:
            make_type(self, element_ty, shape)
            known = of_shapes[tuple(self.shape)] = {**vars(self), "name": "a block"}
            sizes = tl.tuple([tl.constexpr(size) for size in self.shape])
            known["sizes_of_tensors"] = tl.constexpr(self.numel), sizes
        vars(self).update(known)
        self.element_ty = element_ty

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes_of_tensors if type.is_block() else no_sizes

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not (dtype.is_ptr() or data.itemsize * 8 <= dtype.primitive_bitwidth):
            check_size(self)

    def unwrapped(value: Any) -> Any:
        if value.__class__ is tl.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | tl.tuple) else value

    def np_dtype(of: Any) -> Any:
        of = of.scalar if type(of) is tl.block_type else of
        return of_a_scalar(of) if type(of) is tl.dtype else of_any(of)

    interpreter._get_np_dtype = np_dtype
    interpreter.TensorHandle.__init__ = init_handle
    tl.block_type.__init__ = init_type
    tl.block_type.__str__ = lambda self: f"<{self.shape}, {self.element_ty}>"
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.tensor.__init__ = init
    tl.core._normalize_cache_policy = policy
    tl.core._unwrap_if_constexpr = unwrapped


def _check_equal_types_quickly() -> None:
    """Two tensors of one type need no conversion, and of one shape no other."""
    check = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    signature = list(inspect.signature(check).parameters)
    assert signature[-1] == "div_or_mod", signature

    def checked(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        alike = (
            lhs.__class__ is tl.tensor
            and rhs.__class__ is tl.tensor
            and (lhs.type is rhs.type or lhs.type == rhs.type)
            and not lhs.dtype.is_ptr()
        )
        if alike and len(args) < 4 and not kwargs.get("div_or_mod"):
            return lhs, rhs
        return check(self, lhs, rhs, *args, **kwargs)  # type: ignore[no-any-return]

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        alike = vars(lhs.type).get("shape") is vars(rhs.type).get("shape")
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = checked
    TritonSemantic.broadcast_impl_value = broadcasted
