"""Triton's interpreter, with less done anew at each operation of a kernel, and with numbers of FP8
rounded as a GPU rounds them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.recorded_calls import forget, recorded


def interpret_faster() -> None:
    """Find out once what is the same each time. What kernels compute stays as it is, but for
    numbers of FP8."""
    _round_to_fp8()
    _put_language_once()
    _call_builtins_directly()
    _launch_quickly()
    _make_tensors_quickly()
    _compute_directly()


def check_overflow(*, wanted: bool) -> None:
    """Whether each sum and product of integers is computed twice, to see that it fits. Without
    `debug` the interpreter computes it, and says nothing."""
    options = interpreter.InterpreterOptions(sanitize_overflow=wanted, debug=wanted)
    interpreter.interpreter_builder.options = options
    forget()


def _round_to_fp8() -> None:
    """To the nearest number, as PyTorch does. The interpreter's own way cuts numbers off, and loses
    the carry of some (127.5 becomes 64)."""
    convert = interpreter._convert_float

    def converted(given: Any, given_dtype: Any, wanted: Any, rounding: Any) -> Any:
        if (given_dtype, wanted) != (tl.float32, tl.float8e4nv):
            return convert(given, given_dtype, wanted, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(given)).to(torch.float8_e4m3fn)
        return numbers.view(torch.uint8).numpy()

    interpreter._convert_float = converted


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
    """A function of the language is given what interprets it, nobody asks whether it was, and what
    it does is recorded."""
    asking = tl.core.builtin(lambda _semantic: None).__code__
    put = interpreter._patch_attr

    def put_function(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not asking:
            put(owner, name, member, builder, scope)
            return
        scope.set_attr(owner, name, recorded(member.__wrapped__))

    interpreter._patch_attr = put_function


def _launch_quickly() -> None:
    """The parameters of a function are found once, and memory of the host is not copied to it."""
    read = types.SimpleNamespace(**vars(inspect))
    read.getfullargspec = cache(inspect.getfullargspec)
    read.get_annotations = cache(inspect.get_annotations)

    def getcallargs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        names = read.getfullargspec(function).args
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) == len(given) == len(names):
            return given
        return inspect.getcallargs(function, *args, **kwargs)

    read.getcallargs = getcallargs
    interpreter.inspect = read
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *given: None
    # Python 3.11 maps memory for frames in pieces of 16 KiB, and a call that begins a piece maps
    # and unmaps it each time. One large frame is in a piece of its own, with room for those after.
    launch = executor.__call__
    launch.__code__ = launch.__code__.replace(co_stacksize=9000)


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


def _compute_directly() -> None:
    """Masks of loads without one, and zeros where it is false, are made once of a shape, and types
    of arrays are compared as objects, of which numpy has one for each."""
    builder, truth = interpreter.InterpreterBuilder, np.dtype(np.bool_)

    @cache
    def everywhere(shape: tuple[int, ...]) -> Any:
        mask = np.ones(shape, np.bool_)
        mask.setflags(write=False)
        return interpreter.TensorHandle(mask, tl.int1)

    @cache
    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        found = np.zeros(shape, dtype)
        found.setflags(write=False)
        return found

    def load(self: Any, ptr: Any, cache_policy: Any, is_volatile: Any) -> Any:
        return masked_load(self, ptr, everywhere(ptr.data.shape), None, cache_policy, is_volatile)

    def masked_load(
        self: Any, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any
    ) -> Any:
        of = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(of)
        otherwise = zeros(ptrs.data.shape, dtype) if other is None else other.data
        found = interpreter._interpreter.load(ptrs.data, mask.data, otherwise, dtype)
        return interpreter.TensorHandle(found, of)

    compute = builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        one, other = lhs.data, rhs.data
        if one.dtype is truth or one.dtype is not other.dtype:
            return compute(self, lhs, rhs, op)
        found, of = op(one, other), lhs.dtype.scalar
        if found.dtype is not truth and found.dtype is not one.dtype:
            return compute(self, lhs, rhs, op)
        return interpreter.TensorHandle(found, of)

    builder.create_load, builder.create_masked_load = load, masked_load
    builder.binary_op = binary_op
