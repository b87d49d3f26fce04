"""The register of seams: every place of vLLM's internals that tLLM overrides or uses.

A seam is declared where it is used: `overrides` on the method that stands in the place of one of
vLLM's (in a subclass or on an instance), `uses` for what is called or read. `lacking` is what the
probe at start-up asks, so a vLLM that moved a seam is refused before it is misread.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType
from typing import Any, TypeVar

from packaging.version import Version
from vllm.platforms import current_platform

import tllm.engine

_F = TypeVar("_F", bound=Callable[..., Any])
_Kind = inspect.Parameter
_PLACED = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD, _Kind.VAR_POSITIONAL)
_NEEDS = {"tllm.engine.executor_ray": "ray"}
"""Modules of ours that can be imported only where another package is installed."""
_PLATFORMS = {"tllm.engine.worker_cpu": "cpu", "tllm.engine.worker_cuda": "cuda"}
"""Modules of ours for one platform. Importing vLLM's CPU worker puts a placeholder in the place of
`torch.cuda.Event`, for the whole process."""
_SERVING = {"tllm.engine.handlers", "tllm.engine.keyless_logger", "tllm.engine.run_batch"}
"""Modules of ours for what answers requests over HTTP. Importing vLLM 0.30's server sets the root
logger's level to ERROR."""


@dataclass(frozen=True)
class Seam:
    """One place of vLLM's internals that tLLM depends on.

    Attributes:
        path: `module.Class.name` or `module.name`.
        ours: the function in its place, whose parameters vLLM's must have; None for what is only
            used.
        takes: parameters that we give it by name, or read by their place in the call.
        since, until: the first version of vLLM that has it, and the first that has not, where they
            are not all alike.
    """

    path: str
    why: str
    ours: Callable[..., Any] | None = None
    takes: tuple[str, ...] = ()
    since: str = "0"
    until: str | None = None

    def lacks(self) -> str | None:
        """What the imported vLLM lacks of it, as a phrase; None when nothing does."""
        owner_path, _, name = self.path.rpartition(".")
        try:
            owner = pkgutil.resolve_name(owner_path)
        except (ImportError, AttributeError):
            return f"no {owner_path}"
        if not _has(owner, name):
            return f"no {self.path}"
        if self.ours is None and not self.takes:
            return None
        theirs = _parameters(inspect.getattr_static(owner, name), inspect.isclass(owner))
        differs = _difference(theirs, self.ours, self.takes)
        return f"{self.path} with {differs}" if differs else None


_register: list[Seam] = []


def overrides(path: str, why: str, *, takes: str = "", since: str = "0") -> Callable[[_F], _F]:
    """Declare that the decorated method stands in the place of vLLM's.

    Args:
        path: vLLM's, `module.Class.method`.
        takes: parameters that it must have beside those of ours, separated by blanks.
        since: the first version of vLLM that has it.
    """

    def declare(function: _F) -> _F:
        _register.append(Seam(path, why, function, tuple(takes.split()), since))
        return function

    return declare


def uses(
    owner: str, names: str, why: str, *, takes: str = "", since: str = "0", until: str | None = None
) -> None:
    """Declare that things of vLLM's are called, read or set.

    Args:
        owner: a module, or `module.Class`.
        names: what it has, separated by blanks: functions, classes, methods, attributes.
        takes: parameters that each of them must have, separated by blanks.
        since, until: the first version of vLLM that has them, and the first that has not.
    """
    for name in names.split():
        taken = tuple(takes.split())
        _register.append(Seam(f"{owner}.{name}", why, None, taken, since, until))


@cache
def modules(serving: bool = True) -> tuple[ModuleType, ...]:
    """The modules of the engine room, imported, and with that declared what they depend on.

    Args:
        serving: also those that a server alone needs.
    """
    names = module_names(current_platform.device_type)
    return tuple(importlib.import_module(name) for name in names if serving or name not in _SERVING)


def module_names(platform: str) -> Iterator[str]:
    """The modules of the engine room that can be imported here, on a platform of vLLM's."""
    for found in pkgutil.iter_modules(tllm.engine.__path__, "tllm.engine."):
        name = found.name
        installed = name not in _NEEDS or importlib.util.find_spec(_NEEDS[name]) is not None
        if installed and _PLATFORMS.get(name, platform) == platform:
            yield name


def of(version: Version, serving: bool = True) -> Iterator[Seam]:
    """Every seam that this version of vLLM is to have, each path once for each need.

    Args:
        serving: also those that a server alone needs; others are not imported for it.

    Raises:
        ImportError: when vLLM lacks what a module of ours imports from it.
    """
    modules(serving)
    for seam in _register:
        if Version(seam.since) <= version and (not seam.until or version < Version(seam.until)):
            yield seam


def lacking(version: Version, serving: bool = True) -> list[str]:
    """What the imported vLLM lacks, each with what tLLM needs it for, and what it asks of classes
    of ours that they lack. `serving` is that of `of`."""
    try:
        found = [(seam.lacks(), seam.why) for seam in of(version, serving)]
    except ImportError as error:
        return [f"no {error.name}: {error}"]
    lacks = (f"{lack} ({why})" for lack, why in found if lack is not None)
    return [*lacks, *_unmet(modules(serving))]


def _unmet(of_ours: Iterable[ModuleType]) -> Iterator[str]:
    """Abstract methods of vLLM's that a class of ours does not have: none could be made of it."""
    for module in of_ours:
        for ours in filter(inspect.isclass, vars(module).values()):
            if ours.__module__ != module.__name__:
                continue
            for name in sorted(getattr(ours, "__abstractmethods__", ())):
                owner = next(base for base in ours.__mro__ if name in vars(base))
                if owner.__module__.partition(".")[0] == "vllm":
                    path = f"{owner.__module__}.{owner.__qualname__}.{name}"
                    yield f"the abstract method {path} ({ours.__qualname__} has none)"


def _has(owner: Any, name: str) -> bool:
    """Whether a module has a name, or a class of vLLM's a member or an instance attribute."""
    if not inspect.isclass(owner):
        return hasattr(owner, name)
    return any(
        name in vars(base) or name in vars(base).get("__annotations__", ()) or _stores(base, name)
        for base in owner.__mro__
        if base.__module__.partition(".")[0] == "vllm"
    )


def _stores(owner: type, name: str) -> bool:
    """Whether a method of this very class assigns an attribute of that name."""
    return any(
        name in _stored_by(function.__code__)
        for function in map(inspect.unwrap, filter(inspect.isfunction, vars(owner).values()))
        if name in function.__code__.co_names
    )


@cache
def _stored_by(code: CodeType) -> frozenset[str]:
    """Names of the attributes that a function assigns; an engine that starts asks each time."""
    return frozenset(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
    )


def _parameters(function: Any, is_method: bool) -> list[inspect.Parameter]:
    """The parameters of a function, without `self`."""
    bound = is_method and not isinstance(function, staticmethod)
    plain = function.__func__ if isinstance(function, staticmethod | classmethod) else function
    return list(inspect.signature(plain).parameters.values())[bound:]


def _difference(
    theirs: list[inspect.Parameter], ours: Callable[..., Any] | None, takes: tuple[str, ...]
) -> str | None:
    """How vLLM's parameters differ from what we rely on, as a phrase."""
    names = [parameter.name for parameter in theirs]
    lacking = [name for name in takes if name not in names]
    mine = _parameters(ours, True) if ours is not None else []
    placed = [parameter.name for parameter in mine if parameter.kind in _PLACED[:2]]
    at_place = names[: len(placed)]
    lacking += [name for i, name in enumerate(placed) if at_place[i : i + 1] != [name]]
    if lacking:
        return f"{', '.join(lacking)} among its first parameters ({', '.join(names) or 'none'})"
    kinds, known = {p.kind for p in mine}, {p.name for p in mine}
    more = [
        p.name
        for p in theirs
        if p.name not in known
        and (_Kind.VAR_POSITIONAL if p.kind in _PLACED else _Kind.VAR_KEYWORD) not in kinds
    ]
    if ours is not None and more:
        return f"no more parameters than {', '.join(placed) or 'none'} (it has {', '.join(more)})"
    return None
