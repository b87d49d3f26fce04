"""The adapters that questions name."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from vllm.lora.request import LoRARequest

from tllm.client.llm import AsyncLLM
from tllm.engine.capacity import adapters_at_once
from tllm.logprobs.loop import EngineLoop

_Files: TypeAlias = tuple[tuple[str, int, int], ...]
"""Name, time of the last write and size of each file of an adapter."""

_NUMBERS = itertools.count(2**20)
"""Ids of adapters that no other of this process has, and hardly one that a user gives: an engine
takes another adapter under the id of one that it has for that one."""


class Adapter(LoRARequest, weakref=True):  # type: ignore[call-arg]
    """An adapter as a question holds it: while any does, the engine has to keep it."""


class _Named(NamedTuple):
    """One that was added. `told` is its name in the engine, which consumers are told: the second
    weights of one folder are others."""

    number: int
    told: str
    path: str
    files: _Files


class NamedAdapters:
    """Of one engine, by name. One that another replaced leaves the engine when no question and no
    open lane has it any more."""

    def __init__(self, engine: AsyncLLM, loop: EngineLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._named: dict[str, _Named] = {}
        self._loaded: set[int] = set()  # what the engine has of ours
        #: Of each name and path: how often its files were written anew, and which they were last.
        self._written: dict[tuple[str, str], tuple[int, _Files]] = {}
        self._held: WeakValueDictionary[int, Adapter] = WeakValueDictionary()
        self._holding = threading.Lock()

    def add(self, path: str, name: str) -> None:
        """Load an adapter, if it is another one than the name has, or its files were written since.

        Raises:
            ValueError: when the engine was started without `enable_lora`, or has no room.
        """
        config = self._engine.vllm_config.lora_config
        if config is None:
            raise ValueError(
                "the engine has no adapters; start it with engine_opts={'enable_lora': True, "
                "'max_lora_rank': ...}"
            )
        known, files = self._named.get(name), _files_of(path)
        if known is not None and (known.path, known.files) == (path, files):
            return
        self._remove_unused()
        if len(self._loaded) >= adapters_at_once(config):
            if known is None or known.number in self._held:
                raise ValueError(
                    f"max_loras={config.max_loras} adapters at once leaves no room for {name!r} "
                    "(on a CPU one place must stay empty, or vLLM would apply an adapter to "
                    "requests without one; one that was replaced has a place until the lanes that "
                    "were opened with it are closed). Start the engine with "
                    f"max_loras={config.max_loras + 1} or more"
                )
            self._remove(known.number)
        new = _Named(next(_NUMBERS), self._told(name, path, files), path, files)
        try:
            self._load(new)  # one that cannot be loaded is refused now
        except Exception:
            if known is not None and known.number not in self._loaded:
                del self._named[name]
                self._load(known)
                self._named[name] = known
            raise
        self._named[name] = new
        self._remove_unused()

    def named(self, name: str) -> Adapter:
        """Raises `ValueError` for a name under which none was added."""
        known = self._known(name)
        with self._holding:  # two threads that ask hold the same one
            adapter = self._held.get(known.number)
            if adapter is None:
                adapter = self._held[known.number] = _request(known)
        return adapter

    def path(self, name: str) -> str:
        """Where one that was added came from; raises `ValueError` as `named`."""
        return self._known(name).path

    def _known(self, name: str) -> _Named:
        if name not in self._named:
            raise ValueError(
                f"no adapter {name!r} was added; add_new_lora(path, {name!r}) does. Added are "
                f"{', '.join(self._named) or 'none'}"
            )
        return self._named[name]

    def _told(self, name: str, path: str, files: _Files) -> str:
        """vLLM's prefix cache knows adapters by name and path alone."""
        anew, last = self._written.get((name, path), (0, files))
        anew += last != files
        self._written[name, path] = anew, files
        return f"{name} ({anew + 1})" if anew else name

    def _load(self, one: _Named) -> None:
        self._loop.run(self._engine.add_lora(_request(one)))
        self._loaded.add(one.number)

    def _remove(self, number: int) -> None:
        self._loop.run(self._engine.remove_lora(number))
        self._loaded.discard(number)

    def _remove_unused(self) -> None:
        named = {one.number for one in self._named.values()}
        for number in self._loaded - named - set(self._held):
            self._remove(number)


def _request(one: _Named) -> Adapter:
    return Adapter(one.told, one.number, one.path)


def _files_of(path: str) -> _Files:
    """None of an adapter that is not in a folder here."""
    folder = Path(path)
    if not folder.is_dir():
        return ()
    found = ((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in found))
