"""Copies of sampling parameters, one for each request."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from tllm.engine.message_types import check_params
from tllm.params import SamplingParams, plain
from tllm.spec.request import EXTRA_ARG

_SCALARS = frozenset({bool, int, float, str, type(None), RequestOutputKind})
_FIELDS = tuple(name for name in VllmSamplingParams.__struct_fields__ if name != "extra_args")
_values_of = attrgetter(*_FIELDS)
_SEED = _FIELDS.index("seed")
_MAX_KEPT = 1024
_LONGEST_KEPT = 64
"""Longer lists would take much memory, and longer to compare than to check."""


class CheckedParams:
    """Gives each request a copy of its parameters, which vLLM checks, changes and keeps.

    vLLM would make a deep copy of what it is given and check that, which takes as long as
    everything else that it does to take a request in. So it is made here, of vLLM's part alone,
    and vLLM is told that it has one. Parameters are flat but for a few fields; those whose flat
    values are as others' were before, but for the seed, are not checked again. Of classes with
    fields of their own vLLM makes its own copy, as ever.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[VllmSamplingParams, list[str]]] = {}

    def copy(self, params: VllmSamplingParams, wire: Mapping[str, Any]) -> VllmSamplingParams:
        """A copy of vLLM's part that carries this. Raises what vLLM raises for parameters that are
        wrong."""
        theirs = params.extra_args or {}
        extra_args = {**theirs, EXTRA_ARG: wire}
        key = _key(params) if len(extra_args) == 1 else None
        if key is None:
            own = plain(params) if type(params) is SamplingParams else copy.copy(params)
            if type(own) is VllmSamplingParams:
                own.extra_args = {name: theirs[name] for name in theirs if name != EXTRA_ARG}
                own = copy.deepcopy(own)
                extra_args = {**own.extra_args, EXTRA_ARG: wire}
                own.skip_clone = True
            own.extra_args = extra_args
            own.__post_init__()
            check_params(own)
            return own
        known = self._known.get(key)
        # Options of consumers are the user's own, too.
        if known is not None and _can_be_sent(wire.get("consumers")):
            own = _with_own(*known)
            own.extra_args = extra_args
            if own.seed is not None:
                own.seed = params.seed
            return own
        own = plain(params) if type(params) is SamplingParams else params
        own = _with_own(own, _containers(own))
        own.extra_args = extra_args
        own.__post_init__()
        check_params(own)
        own.skip_clone = True
        if known is None:
            self._keep(key, own)
        return own

    def _keep(self, key: Any, checked: VllmSamplingParams) -> None:
        containers = _containers(checked)
        kept = _with_own(checked, containers)
        kept.extra_args = None
        if len(self._known) >= _MAX_KEPT:
            self._known.clear()  # threads may look meanwhile
        self._known[key] = kept, containers


def _can_be_sent(options: Any) -> bool:
    """Whether vLLM would find nothing wrong with a request's options: integers that its messages
    cannot hold. Of what it cannot be sure here it is asked itself."""
    try:
        msgspec.msgpack.encode(options)
    except (OverflowError, TypeError, ValueError):
        return False
    return True


@lru_cache(maxsize=256)
def _places_of_containers(types: tuple[type, ...]) -> tuple[int, ...] | None:
    """Where in the fields lists and sets are; None if others than those and scalars are there."""
    if not _SCALARS.union((list, set)).issuperset(types):
        return None
    return tuple(i for i, kind in enumerate(types) if kind not in _SCALARS)


def _key(params: VllmSamplingParams) -> Any:
    """What parameters are known by; None if they are not flat, or long."""
    if type(params) not in (VllmSamplingParams, SamplingParams):  # it may have fields of its own
        return None
    values = _values_of(params)
    types = tuple(map(type, values))
    places = _places_of_containers(types)
    if places is None:
        return None
    flat: list[Any] = list(values)
    for place in places:
        if len(values[place]) > _LONGEST_KEPT:
            return None
        if values[place]:
            kinds = tuple(map(type, values[place]))
            if not _SCALARS.issuperset(kinds):
                return None
            flat[place] = (*values[place], *kinds)
        else:
            flat[place] = None  # its own type says that it is empty
    if types[_SEED] is int and 0 <= flat[_SEED] < 2**63:  # -1 means none
        flat[_SEED] = 0
    return types, tuple(flat)


def _containers(params: VllmSamplingParams) -> list[str]:
    """The fields of flat parameters that can be changed in place."""
    return [name for name in _FIELDS if type(getattr(params, name)) in (list, set)]


def _with_own(params: VllmSamplingParams, containers: list[str]) -> VllmSamplingParams:
    """A copy that has these fields to itself."""
    own = copy.copy(params)
    for name in containers:
        setattr(own, name, getattr(own, name).copy())
    return own
