"""Copies of sampling parameters, one for each request."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import lru_cache
from operator import attrgetter
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tllm.spec.request import EXTRA_ARG, Wire

_SCALARS = frozenset({bool, int, float, str, type(None), RequestOutputKind})
_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name != "extra_args")
_values_of = attrgetter(*_FIELDS)
_MAX_KEPT = 1024
#: Parts of a request's spec that hold nothing of the user's own.
_OURS = frozenset({"request_id", "prompt_id", "num_samples", "steering"})


class CheckedParams:
    """Gives each request a copy of its parameters, which vLLM checks, changes and keeps.

    vLLM would make a deep copy of what it is given and check that, which takes as long as
    everything else that it does to take a request in. Parameters are flat but for a few fields; if
    those are not given, so is the copy, and vLLM is told that it has one. And flat parameters are
    known by their values: those that are as others were before are not checked again.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Any, tuple[SamplingParams, list[str]]] = OrderedDict()

    def copy(self, params: SamplingParams, asked: Wire) -> SamplingParams:
        """A copy that asks this of us. Raises what vLLM raises for parameters that are wrong."""
        extra_args = {**(params.extra_args or {}), EXTRA_ARG: asked}
        key = _key(params) if len(extra_args) == 1 else None
        if key is None:
            own = copy.copy(params)
            own.extra_args = extra_args
            return own
        known = self._known.get(key) if asked.keys() <= _OURS else None
        if known is not None:
            self._known.move_to_end(key)
            own = _with_own(*known)
            own.extra_args = extra_args
            return own
        own = _with_own(params, _containers(params))
        own.extra_args = extra_args
        own.__post_init__()
        own.skip_clone = True
        containers = _containers(own)
        kept = _with_own(own, containers)
        kept.extra_args = None
        self._known[key] = kept, containers
        if len(self._known) > _MAX_KEPT:
            self._known.popitem(last=False)
        return own


@lru_cache(maxsize=256)
def _places_of_containers(types: tuple[type, ...]) -> tuple[int, ...] | None:
    """Where in the fields lists and sets are; None if others than those and scalars are there."""
    if not _SCALARS.union((list, set)).issuperset(types):
        return None
    return tuple(i for i, kind in enumerate(types) if kind not in _SCALARS)


def _key(params: SamplingParams) -> Any:
    """What parameters are known by; None if they are not flat."""
    values = _values_of(params)
    types = tuple(map(type, values))
    places = _places_of_containers(types)
    if places is None:
        return None
    flat: list[Any] = list(values)
    for place in places:
        if values[place]:
            kinds = tuple(map(type, values[place]))
            if not _SCALARS.issuperset(kinds):
                return None
            flat[place] = (*values[place], *kinds)
        else:
            flat[place] = None  # its own type says that it is empty
    return type(params), types, tuple(flat)


def _containers(params: SamplingParams) -> list[str]:
    """The fields of flat parameters that can be changed in place."""
    return [name for name in _FIELDS if type(getattr(params, name)) in (list, set)]


def _with_own(params: SamplingParams, containers: list[str]) -> SamplingParams:
    """A copy that has these fields to itself."""
    own = copy.copy(params)
    for name in containers:
        setattr(own, name, getattr(own, name).copy())
    return own
