"""Every place of vLLM that is used or overridden is registered, and missed when it is gone."""

from __future__ import annotations

import abc
import ast
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tllm
from tllm.engine import seams, versions

_FOUND = versions.installed()
assert _FOUND is not None
VERSION = _FOUND.version
pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] == "1",
    reason="seams of both runners are looked at in the V1 pass",
)
PATHS = sorted({seam.path for seam in seams.of(VERSION)})


def test_the_installed_vllm_has_every_seam() -> None:
    assert seams.lacking(VERSION) == []


@pytest.mark.parametrize("path", PATHS)
def test_a_seam_that_is_gone_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner_path, _, name = path.rpartition(".")
    _take_away(pkgutil.resolve_name(owner_path), name, monkeypatch)
    with pytest.raises(RuntimeError) as refusal:
        versions.probe(serving=True)
    sentence = str(refusal.value)
    assert f"no {path} (" in sentence
    assert str(VERSION) in sentence
    assert f"pip install '{_FOUND.distribution}=={versions.NEWEST}'" in sentence


def _take_away(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rename a member of a module or class, or an attribute that methods of a class assign."""
    if not inspect.isclass(owner):
        if name in vars(owner):
            monkeypatch.delattr(owner, name)
        else:  # made on demand, by the module's `__getattr__`
            made = owner.__getattr__
            monkeypatch.setattr(owner, "__getattr__", lambda n: _raise(n) if n == name else made(n))
        return
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] != "vllm":
            continue
        if name in vars(base):
            monkeypatch.delattr(base, name)
        if name in vars(base).get("__annotations__", {}):
            monkeypatch.delitem(base.__annotations__, name)
        for function in map(inspect.unwrap, filter(inspect.isfunction, vars(base).values())):
            code = function.__code__
            if name in code.co_names:
                names = tuple(f"not_{each}" if each == name else each for each in code.co_names)
                monkeypatch.setattr(function, "__code__", code.replace(co_names=names))


def _raise(name: str) -> Any:
    raise AttributeError(name)


def test_the_method_of_a_seam_that_takes_other_parameters_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def renamed(self: Any, req: Any, delay_free_blocks: bool = False) -> None: ...
    def longer(self: Any, session: Any, update: Any, when: float) -> None: ...

    monkeypatch.setattr(Scheduler, "_free_request", renamed)
    monkeypatch.setattr(Scheduler, "_update_request_as_session", longer)
    found = "\n".join(seams.lacking(VERSION))
    assert "Scheduler._free_request with request among its first parameters (req, " in found
    assert "_update_request_as_session with no more parameters than session, update" in found
    assert "(it has when)" in found


def test_what_is_called_and_takes_other_parameters_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    def renamed(self: Any, block_hashes: Any, max_length: int) -> None: ...

    monkeypatch.setattr(KVCacheCoordinator, "find_longest_cache_hit", renamed)
    (found,) = seams.lacking(VERSION)
    assert "find_longest_cache_hit with max_cache_hit_length among its first parameters" in found


def test_an_abstract_method_that_ours_does_not_have_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.33 asks one more of what comes of a step, and engines died of their first verdict."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    from tllm.engine.verdicts import _JudgedOutput as Judged

    @abc.abstractmethod
    def later(self: Any) -> None: ...

    monkeypatch.setattr(AsyncModelRunnerOutput, "later", later, raising=False)
    for each in (AsyncModelRunnerOutput, Judged):
        monkeypatch.setattr(each, "__abstractmethods__", each.__abstractmethods__ | {"later"})
    (found,) = seams.lacking(VERSION)
    name = "vllm.v1.outputs.AsyncModelRunnerOutput.later"
    assert found == f"the abstract method {name} ({Judged.__qualname__} has none)"
    with pytest.raises(RuntimeError, match=f"has the abstract method {name}"):
        versions.probe()


def test_a_seam_of_later_versions_is_not_missed_in_earlier_ones() -> None:
    later = [seam.path for seam in seams.of(versions.NEWEST) if seam.since == "0.31"]
    assert later
    assert not set(later) & {seam.path for seam in seams.of(versions.OLDEST)}


def test_what_an_engine_is_asked_for_is_not_in_the_server_of_vllm() -> None:
    """Importing vLLM 0.30's server has the root logger tell errors alone: an engine's warnings were
    not heard in programs that serve nobody."""
    of_engines = ("vllm.entrypoints.llm", "vllm.entrypoints.generate.", "vllm.entrypoints.cli.main")
    found = {
        (module.__name__, node.value)
        for module in seams.modules(serving=False)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant) and str(node.value).startswith("vllm.entrypoints.")
    }
    assert found
    assert not [(ours, path) for ours, path in found if not path.startswith(of_engines)]


def _declared() -> set[Callable[..., Any]]:
    return {seam.ours for seam in seams.of(VERSION) if seam.ours is not None}


def test_methods_that_override_those_of_vllm_are_registered() -> None:
    found = 0
    for module in seams.modules():
        for cls in filter(inspect.isclass, vars(module).values()):
            bases = [c for c in inspect.getmro(cls) if c.__module__.startswith("vllm")]
            ours = [c for c in inspect.getmro(cls) if c.__module__.startswith("tllm.engine")]
            for name, member in ((n, m) for c in ours for n, m in vars(c).items()):
                if inspect.isfunction(member) and any(name in vars(base) for base in bases):
                    found += 1
                    assert member in _declared() or name == "__init__", member.__qualname__
    assert found >= 10


def test_attributes_that_are_set_on_objects_of_vllm_are_registered() -> None:
    """Whatever is not `self` and gets an attribute could be vLLM's."""
    newest = {seam.path for seam in seams.of(versions.NEWEST)}  # what older ones have not, too
    registered = {path.rpartition(".")[2] for path in {*PATHS, *newest}}
    seen: set[str] = set()
    for module in seams.modules():
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            for name in _names_set(node):
                ours = name.startswith("tllm_") or name in _OURS
                assert ours or name in registered, f"{module.__name__}: {name}"
                seen.add(name)
    assert {"_model_forward", "process_outputs", "find_longest_cache_hit", "sample"} <= seen


_OURS = {"scheduler_output", "requests_held_back", "requests_preempted", "count_all_drafts"}
"""Attributes that are set on objects of our own."""

_REPLACERS = {"setattr": 1, "_override_when_observed": 1}
"""Functions that replace an attribute, and which of their arguments names it."""


def _names_set(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
        targets = getattr(node, "targets", None) or [node.target]  # type: ignore[union-attr]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                own = isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
                if isinstance(each, ast.Attribute) and not own:
                    yield each.attr
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func).rpartition(".")[2]
        if function in _REPLACERS:
            name = node.args[_REPLACERS[function]]
            if isinstance(name, ast.Constant):
                yield name.value


def test_a_gpu_does_not_import_the_cpu_worker():
    """It would leave no `torch.cuda.Event` that can tell the time."""
    of_cuda, of_cpu = (set(seams.module_names(platform)) for platform in ("cuda", "cpu"))
    assert of_cuda - of_cpu == {"tllm.engine.worker_cuda"}
    assert of_cpu - of_cuda == {"tllm.engine.worker_cpu"}


_PUBLIC = {
    "vllm",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.engine.protocol",
    "vllm.inputs",
    "vllm.lora.request",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.sampling_params",
    "vllm.usage.usage_lib",
}
"""What rooms other than the engine's may import from vLLM."""


def test_only_the_engine_room_imports_internals_of_vllm() -> None:
    room = Path(tllm.__path__[0])
    found = {
        (str(source.relative_to(room)), name)
        for source in room.rglob("*.py")
        if source.parent != room / "engine"
        for node in ast.walk(ast.parse(source.read_text()))
        for name in _imported(node)
        if name.partition(".")[0] == "vllm" and name not in _PUBLIC
    }
    assert found == set()


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
