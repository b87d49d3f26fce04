"""Triton's interpreter, with less done anew at each operation of a kernel."""

from __future__ import annotations

import inspect
import math
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


def _make_tensors_quickly() -> None:
    """What follows from a type is found once for it."""
    of_a_scalar, of_any = cache(interpreter._get_np_dtype), interpreter._get_np_dtype
    unwrap = tl.core._unwrap_if_constexpr
    no_sizes = tl.constexpr(1), tl.tuple([])

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.numel, self.shape = no_sizes
            return
        sizes = vars(type).get("sizes_of_tensors")
        if sizes is None:
            sizes = (
                tl.constexpr(math.prod(type.shape)),
                tl.tuple([tl.constexpr(size) for size in type.shape]),
            )
            type.sizes_of_tensors = sizes
        self.numel, self.shape = sizes

    def unwrapped(value: Any) -> Any:
        if value.__class__ is tl.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | tl.tuple) else value

    interpreter._get_np_dtype = lambda of: of_a_scalar(of) if type(of) is tl.dtype else of_any(of)
    tl.tensor.__init__ = init
    tl.core._unwrap_if_constexpr = unwrapped


def _check_equal_types_quickly() -> None:
    """Two tensors of one type need no conversion."""
    check = TritonSemantic.binary_op_type_checking_impl
    signature = list(inspect.signature(check).parameters)
    assert signature[-1] == "div_or_mod", signature

    def checked(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        alike = (
            lhs.__class__ is tl.tensor
            and rhs.__class__ is tl.tensor
            and lhs.type == rhs.type
            and not lhs.dtype.is_ptr()
        )
        if alike and len(args) < 4 and not kwargs.get("div_or_mod"):
            return lhs, rhs
        return check(self, lhs, rhs, *args, **kwargs)  # type: ignore[no-any-return]

    TritonSemantic.binary_op_type_checking_impl = checked
