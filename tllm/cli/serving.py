"""`tllm serve` and `tllm run-batch`: ordinary commands of vLLM's, with what interventions need."""

from __future__ import annotations

import json
import os
import runpy
import secrets
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from setproctitle import setproctitle
from yaml import YAMLError

from tllm.cli.files import check_there
from tllm.client.arguments import split
from tllm.client.composer import module_tiers
from tllm.consumers.base import Consumer
from tllm.engine import launch
from tllm.engine.options import CONFIG_KEY, EngineOptions, engine_arguments
from tllm.registry import consumer_from_spec
from tllm.server.fields import is_sendable
from tllm.server.limits import read_limits
from tllm.server.settings import VARIABLE, ServerSettings
from tllm.spec.reading import check_name, said_of
from tllm.steering.files import module_in

_PLUGINS = "VLLM_PLUGINS"
_LOADED_UNNAMED = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups of plugins that vLLM loads whole where `VLLM_PLUGINS` is not set."""
_GIVEN = ("--worker-cls", "--scheduler-cls", "--additional-config")
"""Options of vLLM's that make its engine ours."""
_ENGINE_OPTIONS = {f.name for f in fields(EngineOptions)} - {"hook_points"} | {"enable_steering"}
"""What `--engine-arg` gives."""


def settings_of(given: Mapping[str, Any]) -> ServerSettings:
    """The settings of a server: those of the command line, and those without an option of their
    own, or that were not given there, of the environment (`TLLM_SERVER`)."""
    of_command = ServerSettings.model_validate(given)
    chosen = of_command.model_dump(exclude_defaults=True)
    try:
        named = ServerSettings.from_environment()
    except ValidationError as error:
        # What is no JSON at all is wrong in no place.
        places = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        wrong = "; ".join(": ".join(filter(None, place)) for place in places)
        raise ValueError(f"{VARIABLE} in the environment has {wrong}") from None
    for name in chosen.keys() & named.model_fields_set:
        if chosen[name] != getattr(named, name):
            raise ValueError(
                f"{name} was given as an option and in {VARIABLE} of the environment; give it once"
            )
    return named.model_copy(update={name: getattr(of_command, name) for name in chosen})


def command(
    name: str,
    given: Sequence[str],
    more: Sequence[str],
    settings: ServerSettings,
    options: dict[str, Any],
    own: Collection[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The command line of a command of vLLM's, and what its environment has beside ours.

    Args:
        name: `serve` or `run-batch`.
        given: its arguments of which our command has its own, such as the model.
        more: its further arguments.
        options: fields of `EngineOptions` that were given.
        own: options of our command itself, such as `--consumer` and `--no-allow-capture`.
    """
    read = _read_by_vllm(name, more, own, [*_GIVEN, *filter(_flag_of, given)])
    if settings.captures_folder is None and _any_port(read):
        settings = settings.model_copy(update={"captures_folder": _folder_of_its_own()})
    engine = _engine(read, settings, options)
    return [sys.executable, *launch.command(name), *given, *engine, *more], {
        _PLUGINS: ",".join(_allowed_plugins()),
        VARIABLE: settings.model_dump_json(exclude_defaults=True),
    }


def _read_by_vllm(
    name: str, more: Sequence[str], own: Collection[str], given_by_us: Sequence[str]
) -> list[str]:
    """The options that a command of vLLM's will have read, those of its file first: what the
    command line says counts where both say something. Those of ours are refused."""
    of_file = _options_of_file(name, more, own)
    for flag in filter(None, map(_flag_of, [*more, *of_file])):
        if (option := flag.removeprefix("--").replace("-", "_")) in _ENGINE_OPTIONS:
            raise ValueError(
                f"{flag} is no option of vllm {name}, but an argument of tLLM's engine: give "
                f"--engine-arg {option}=VALUE"
            )
    for flag in given_by_us:
        for place, options_there in (("", more), (" in the file of --config", of_file)):
            given = [each for each in map(_flag_of, options_there) if len(each) > 2]
            if any(map(flag.startswith, given)):
                raise ValueError(
                    f"{flag} was given{place}, but tllm {name} gives it itself; leave it out"
                )
    return [*of_file, *more]


def _engine(read: Sequence[str], settings: ServerSettings, options: dict[str, Any]) -> list[str]:
    """Options of vLLM's with which its engine is ours."""
    consumers = list(map(_consumer, (*settings.consumers, *settings.capture_consumers)))
    counted = Counter(consumer.consumer_id for consumer in consumers)
    if twice := [name for name, count in counted.items() if count > 1]:
        raise ValueError(f"two consumers are called {twice[0]!r}; give one another consumer_id")
    engine = engine_arguments({"enforce_eager": _is_eager(read)}, options, consumers)
    config = {CONFIG_KEY: engine["additional_config"][CONFIG_KEY]}
    values = (engine["worker_cls"], engine["scheduler_cls"], json.dumps(config))
    return list(chain.from_iterable(zip(_GIVEN, values, strict=True)))


def _allowed_plugins() -> list[str]:
    """What vLLM would load without us, and our routes, which it loads only where they are named."""
    if _PLUGINS in os.environ:
        others = [name for name in os.environ[_PLUGINS].split(",") if name]
    else:
        groups = (entry_points(group=group) for group in _LOADED_UNNAMED)
        others = sorted(plugin.name for plugin in chain.from_iterable(groups))
    return list(dict.fromkeys([*others, "tllm"]))


def _options_of_file(command: str, more: Sequence[str], own: Collection[str]) -> list[str]:
    """The options that vLLM takes from the file after `--config`. One of our command itself, which
    vLLM does not know, and drops where its value is false, is refused."""
    if any(each.startswith("--config=") for each in more):
        raise ValueError(
            "--config=FILE was given, which vLLM takes without reading the file; give --config FILE"
        )
    path = next((after for argument, after in pairwise(more) if argument == "--config"), None)
    if path is None:
        return []
    try:
        names, options = launch.read_options(path)
    except (OSError, ValueError, YAMLError) as error:
        raise ValueError(f"--config {path!r}: {error}") from None
    for name in names:
        if (flag := _flag_of(f"--{name}")) in own:
            raise ValueError(
                f"{name} was given in the file of --config, whose options are those of vllm "
                f"{command}; it is one of tllm {command}'s own: give {flag} on the command line"
            )
    return options


def _is_eager(more: Sequence[str]) -> bool:
    """Whether the server computes without graphs: of two words for it, the last counts."""
    flags = [_flag_of(each) for each in more]
    words = [flag for flag in flags if flag in ("--enforce-eager", "--no-enforce-eager")]
    return words[-1:] == ["--enforce-eager"]


def _any_port(more: Sequence[str]) -> bool:
    """Whether the system chooses the server's port. Its folder cannot be named after that: two
    servers of one user would share results, and the count of what callers have in flight."""
    port = ""
    for argument, after in zip_longest(more, more[1:], fillvalue=""):
        if _flag_of(argument) == "--port":
            port = argument.partition("=")[2] if "=" in argument else after
    return port == "0"


def _folder_of_its_own() -> Path:
    return Path(tempfile.gettempdir(), f"tllm-captures-{os.getuid()}-{secrets.token_hex(8)}")


def check_admin_key(key: str | None) -> None:
    """Refuse a key that no caller could give."""
    if key == "":
        raise ValueError(
            "--admin-api-key is empty; give a key, or leave it out: the admin routes then answer "
            "on loopback only"
        )
    if key is not None and not is_sendable(key):
        raise ValueError(
            "--admin-api-key has characters that no header carries; give printable ASCII, without "
            "spaces or line ends at its ends"
        )


def _consumer(spec: str) -> Consumer:
    try:
        return consumer_from_spec(spec)
    except TypeError as error:  # what the package of it made is no consumer
        raise ValueError(f"--consumer {spec!r}: {error}") from None


def _flag_of(argument: str) -> str:
    """The flag that vLLM reads in an argument, or its beginning, which is enough there:
    `--worker_cls=x` and `--additional-config.x=1` are `--worker-cls` and `--additional-config`.
    Empty where an argument is none."""
    name, _, _ = argument.partition("=")
    if not name.startswith("--"):
        return ""
    return name.partition(".")[0].replace("_", "-")


def engine_options(given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Options of tLLM's engine, from `--engine-arg`."""
    arguments = dict(given)
    if unknown := sorted(arguments.keys() - _ENGINE_OPTIONS):
        raise ValueError(
            f"--engine-arg {unknown[0]!r} is not known; give one of "
            f"{', '.join(sorted(_ENGINE_OPTIONS))}; what "
            "vLLM takes is given as to vllm serve, hook points and consumers by their own options"
        )
    return split(arguments)[1]


def modules_of(given: Sequence[str]) -> dict[str, str]:
    """`name=path` arguments as paths by name, of files that the server can read."""
    found = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"--steering-module {each!r}: give name=path")
        with said_of(f"--steering-module {each!r}"):
            check_name(name, "module")
        if name in found:
            raise ValueError(f"--steering-module {each!r}: {name!r} was given before; give it once")
        found[name] = str(Path(path).resolve())
        check_there(f"--steering-module {name}", Path(path))
        try:
            module_tiers(name, module_in(path))
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"--steering-module {each!r}: {error}") from None
    return found


def limits_file(path: Path | None) -> Path | None:
    """A file of limits, which the server's processes will read; refused now if it is wrong."""
    if path is None:
        return None
    try:
        read_limits(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--limits {str(path)!r}: {error}") from None
    return path.resolve()


def shown(arguments: Sequence[str], environment: dict[str, str]) -> str:
    """A command as one would type it; the admin key is not shown."""
    settings = ServerSettings.model_validate_json(environment[VARIABLE])
    if settings.admin_api_key is not None:
        hidden = settings.model_copy(update={"admin_api_key": "..."})
        environment = {**environment, VARIABLE: hidden.model_dump_json(exclude_defaults=True)}
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*variables, *map(shlex.quote, arguments)])


def run(arguments: Sequence[str], environment: dict[str, str]) -> None:
    """Do what that command does, in this process: vLLM, which is imported here, takes a new one
    many seconds to import."""
    os.environ.update(environment)
    setproctitle(shlex.join(arguments))  # lists of processes show no option of ours, such as a key
    _, _, module, *sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # it would be warned of
    runpy.run_module(module, run_name="__main__", alter_sys=True)
