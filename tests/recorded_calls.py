"""What functions of Triton's language do, recorded, so that it is found out once.

A function of the language finds out from the types of its operands, and from the constants among
them, how to convert and to broadcast them, and then has the interpreter's builder compute with
arrays: one operation or a few, behind dozens of questions. What the builder was asked for operands
of some types is kept. For the next ones of these types it is asked the same, and nothing else is
done; what the builder computes stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Plan = Callable[[list[Any]], Any]
"""Does with operands what a function does with those of their types."""

_CONVERSIONS = frozenset(
    f"create_{name}"
    for name in (
        *("splat", "broadcast", "expand_dims", "reshape", "bitcast", "int_cast", "make_range"),
        *("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "fp_to_fp"),
    )
)
"""What the builder makes of constants that is the same each time."""

_tokens: dict[tuple[Any, ...], int] = {}
_to_forget: list[dict[tuple[Any, ...], Plan]] = []


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language, which takes `_semantic`, as kernels call it."""
    plans: dict[tuple[Any, ...], Plan] = {}
    _to_forget.append(plans)
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        if semantic.builder is not builder:  # this call is a part of one that is recorded
            return function(*args, **kwargs)
        operands: list[Any] = []
        try:
            known = _known(args, kwargs, operands)
        except _UnknownError:
            return function(*args, **kwargs)
        plan = plans.get(known)
        if by_truth := plan is _by_truth:
            known += tuple(map(_truth, operands))
            plan = plans.get(known)
        if plan is None:
            recording = _Recording(operands)
            answer = recording.watch(partial(function, *args, **kwargs))
            plan = recording.plan(answer)
            if recording.asked and not by_truth and plan is not _again:
                plans[known] = _by_truth
                known += tuple(map(_truth, operands))
            plans[known] = plan
            return answer
        return function(*args, **kwargs) if plan is _again else plan(operands)

    return call


def forget() -> None:
    """Record anew: the builder's options are others."""
    for plans in _to_forget:
        plans.clear()


def _again(operands: list[Any]) -> Any:
    """Stands for calls that cannot be recorded."""
    raise AssertionError("it is never called")


def _by_truth(operands: list[Any]) -> Any:
    """Stands for calls that also depend on which of the operands are zero."""
    raise AssertionError("it is never called")


def _truth(operand: Any) -> bool:
    data = operand.handle.data
    return data.size != 1 or bool(data)


class _UnknownError(Exception):
    """No constant, and no tensor."""


def _known(args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Any]) -> tuple[Any, ...]:
    """What a function can find out of its arguments without looking into tensors, which become
    operands."""
    key: list[Any] = []
    for arg in args:
        if arg.__class__ is tl.tensor:
            operands.append(arg)
            key.append(arg.type.token or _token(arg.type))
        else:
            _describe(arg, key, operands)
    if len(kwargs) > 1:
        for name, arg in kwargs.items():
            if name != "_semantic":
                key.append(name)
                _describe(arg, key, operands)
    if len(operands) > 1:  # the record would not tell one from the other if they are the same
        handles = [id(each.handle) for each in operands]
        if handles[0] == handles[1] or (len(handles) > 2 and len(set(handles)) < len(handles)):
            key.append(tuple(map(handles.index, handles)))
    return tuple(key)


def _describe(value: Any, key: list[Any], operands: list[Any]) -> None:
    kind = value.__class__
    if kind is tl.tensor:
        operands.append(value)
        key.append(value.type.token or _token(value.type))
        return
    key.append(kind)
    if kind is int or kind is bool or kind is str:
        key.append(value)
    elif kind is float:
        key.append(value.hex())  # zeros have a sign
    elif kind is tl.constexpr:
        _describe(value.value, key, operands)
    elif kind is tuple or kind is list or kind is tl.tuple:
        key.append(len(value))
        for each in value:
            _describe(each, key, operands)
    elif kind is slice:
        _describe((value.start, value.stop, value.step), key, operands)
    elif isinstance(value, tl.dtype):
        key.append(_token(value))
    elif value is not None:
        raise _UnknownError


def _token(of: Any) -> int:
    """The number of a type; equal ones have the same."""
    found: tuple[Any, ...]
    kind = type(of)
    if kind is tl.block_type:
        found = ("block", of.shape, _token(of.element_ty))
    elif kind is tl.pointer_type:
        found = ("pointer", _token(of.element_ty), of.address_space, of.const)
    elif kind is tl.dtype:
        found = ("scalar", of.name)
    else:
        raise _UnknownError
    of.token = token = _tokens.setdefault(found, 1 + len(_tokens))
    return token


tl.dtype.token = 0  # of types that have no number yet


class _Recording:
    """Stands in the builder's place while a function is called, and keeps what is asked of it.

    Attributes:
        asked: whether the function asked of an operand whether it is zero.
    """

    def __init__(self, operands: list[Any]) -> None:
        self.asked = False
        self._operands = operands
        self._builder = interpreter.interpreter_builder
        self._repeats = True  # what is done follows from the operands' types, and is all kept
        # What the builder is given and gives: the operands' handles, constants, results.
        self._values: list[Any] = [each.handle for each in operands]
        self._constants: set[int] = set()
        self._places = {id(handle): place for place, handle in enumerate(self._values)}
        # The builder's functions, with the places of what they are given and of what they give.
        self._steps: list[tuple[Callable[..., Any], list[int], int | None]] = []

    def watch(self, call: Callable[[], Any]) -> Any:
        """The answer of a call, which is recorded."""
        semantic, tensor = interpreter.interpreter_semantic, tl.tensor
        is_true, index = tensor.__bool__, tensor.__index__

        def asked(of: Any) -> bool:
            self._note_question(of)
            return bool(is_true(of))

        def read(of: Any) -> int:
            self._repeats = False
            return int(index(of))

        semantic.builder, tensor.__bool__, tensor.__index__ = self, asked, read
        try:
            return call()
        finally:
            semantic.builder = self._builder
            tensor.__bool__, tensor.__index__ = is_true, index

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        return partial(self._ask, name, found) if callable(found) else found

    def _ask(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        handle = isinstance(answer, TensorHandle)
        if name.startswith("get_"):
            if handle:
                self._keep_constant(answer)
            return answer
        places = [self._place(arg) for arg in args]
        self._repeats &= (
            not kwargs and (handle or answer is None) and id(answer) not in self._places
        )
        if handle and name in _CONVERSIONS and self._constants.issuperset(places):
            self._keep_constant(answer)
        else:
            self._steps.append((function, places, self._keep(answer) if handle else None))
        return answer

    def _place(self, value: Any) -> int:
        if isinstance(value, TensorHandle):
            place = self._places.get(id(value))
            if place is not None:
                return place
            self._repeats = False
        elif isinstance(value, list | tuple):
            self._repeats &= not any(isinstance(each, TensorHandle) for each in value)
        place = len(self._values)
        self._values.append(value)
        self._constants.add(place)
        return place

    def _keep(self, handle: TensorHandle) -> int:
        self._places[id(handle)] = place = len(self._values)
        self._values.append(handle)
        return place

    def _keep_constant(self, handle: TensorHandle) -> None:
        handle.data.setflags(write=False)
        self._constants.add(self._keep(handle))

    def _note_question(self, of: Any) -> None:
        place = self._places.get(id(of.handle))
        if place is not None and place < len(self._operands):
            self.asked = True
        elif place not in self._constants:
            self._repeats = False

    def plan(self, answer: Any) -> Plan:
        """How to have the same done with other operands."""
        operand = next((n for n, each in enumerate(self._operands) if each is answer), None)
        result: int | None = None
        void = type(answer) is tl.tensor and answer.handle is None  # as stores give
        if operand is None and answer is not None and not void:
            result = self._places.get(id(answer.handle)) if type(answer) is tl.tensor else None
            self._repeats &= result is not None
        if not self._repeats:
            return _again
        # In a plan constants follow the operands' handles, and what steps give follows in turn.
        given = [place for _, _, place in self._steps if place is not None]
        order = [*range(len(self._operands)), *sorted(self._constants), *given]
        constants = [self._values[place] for place in sorted(self._constants)]
        steps = [
            (function, _picked([order.index(place) for place in places]), gives is not None)
            for function, places, gives in self._steps
        ]
        if operand is not None and not steps:
            return itemgetter(operand)
        kind, last = (None, 0) if result is None else (answer.type, order.index(result))

        def several(operands: list[Any]) -> Any:
            values = [each.handle for each in operands]
            values += constants
            for function, pick, gives in steps:
                found = function(*pick(values))
                if gives:
                    values.append(found)
            if kind is not None:
                return tl.tensor(values[last], kind)
            return answer if operand is None else operands[operand]

        if len(steps) == 1 and result in given:
            function, places, _ = self._steps[0]
            places = [order.index(place) for place in places]
            return _one_step(function, places, len(self._operands), constants, kind)
        return several


def _one_step(
    function: Callable[..., Any], places: list[int], count: int, constants: list[Any], kind: Any
) -> Plan:
    """Of one operation, which gives the answer, with so many operands."""
    tensor = tl.tensor
    if len(places) == 2 and max(places) < count:
        first, second = places
        return lambda of: tensor(function(of[first].handle, of[second].handle), kind)
    if places[:1] == [0] and count == 1 and min(places[1:], default=0) > 0:
        if len(places) == 2:
            constant = constants[places[1] - 1]
            return lambda of: tensor(function(of[0].handle, constant), kind)
        others = [constants[place - 1] for place in places[1:]]
        return lambda of: tensor(function(of[0].handle, *others), kind)
    pick = _picked(places)

    def one(of: list[Any]) -> Any:
        handles = [each.handle for each in of]
        return tensor(function(*pick(handles + constants)), kind)

    return one


def _picked(places: list[int]) -> Callable[[list[Any]], Any]:
    """The values at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))
