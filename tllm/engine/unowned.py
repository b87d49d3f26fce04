"""Methods that ours stand in the place of, on objects that end when their user has them no more."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any


def unowned(owner: Any, name: str) -> Callable[..., Any]:
    """A method of an object, for what the object has: with a cycle of references an engine would
    stay, and all its memory, since vLLM takes it out of what Python collects. What somebody has put
    in the method's place is kept as it is."""
    method: Callable[..., Any] = getattr(owner, name)
    if not is_own(method, owner):
        return method
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = found()
        assert own is not None, "an engine that has ended calls nothing"
        return own(*args, **kwargs)

    return call


def is_own(method: Callable[..., Any], owner: Any) -> bool:
    """Whether a method is the object's, and nobody's in its place."""
    return inspect.ismethod(method) and method.__self__ is owner
