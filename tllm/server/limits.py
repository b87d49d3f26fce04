"""What a caller may ask of interventions, by its API key, and how much of it at a time."""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tllm.client.consumer_calls import request_flows
from tllm.consumers.base import Consumer
from tllm.server.fields import ENDING_FIELDS, FieldError, bearer_key, is_sendable
from tllm.shared_memory import start_time
from tllm.spec.media import PromptMedia

_SHA256 = "sha256:"
SWEEP = "patch_sweep"
"""What a sweep is called among the fields that a caller asks."""


class Limits(BaseModel):
    """What one caller may ask. What is None is not limited."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    capture: bool = True
    """Whether its requests may capture."""
    consumers: bool = True
    """Whether they may give options to consumers."""
    steering: bool = True
    """Whether they may steer."""
    patching: bool = True
    """Whether they may patch."""
    rows: int | None = Field(default=None, ge=0)
    """The most rows that a request may ask for, of all hook points, prompts and samples."""
    bytes: int | None = Field(default=None, ge=0)
    """The most bytes of them."""
    vectors: int | None = Field(default=None, ge=0)
    """The most vectors, clamps and probes of conditions in a request."""
    configurations: int | None = Field(default=None, ge=0, le=1 << 16)
    """The most distinct ways of steering of its requests in flight."""
    conversations: int | None = Field(default=None, ge=0)
    """The most conversations that are remembered for it at a time."""
    experiments: int | None = Field(default=None, ge=0)
    """The most experiments of a sweep."""
    requests: int | None = Field(default=None, ge=0)
    """The most requests in flight that ask for interventions."""

    def check(self, asked: Mapping[str, Any]) -> None:
        """Refuse what a request may not ask at all. Raises `FieldError`.

        Args:
            asked: the fields of a request, or a `SWEEP`.
        """
        steers = _steers(asked)
        for allowed, names in (
            (self.capture, ["capture"] if "capture" in asked else []),
            (self.consumers, ["consumers"] if "consumers" in asked else []),
            (self.steering, steers),
            (self.patching, [name for name in ("patch", SWEEP) if name in asked]),
        ):
            if names and not allowed:
                raise FieldError(
                    names[0],
                    f"{names[0]} was given, but this server does not allow it with this API key",
                    HTTPStatus.FORBIDDEN,
                )
        if self.vectors is None:
            return
        count = 0
        for name in steers:
            count += _vectors_of(name, asked[name])
            if count > self.vectors:
                told = name if name == steers[0] else f"{', '.join(steers)} together"
                raise FieldError(
                    name,
                    f"{told}: more than {self.vectors} vectors, clamps and probes, which is what a "
                    "request may have with this API key",
                    HTTPStatus.BAD_REQUEST,
                )

    def check_rows(self, rows: int, row_bytes: int, field: str) -> None:
        """Refuse a request for too many rows. Raises `FieldError`."""
        for number, limit, what in (
            (rows, self.rows, "rows"),
            (rows * row_bytes, self.bytes, "bytes"),
        ):
            if limit is not None and number > limit:
                raise FieldError(
                    field,
                    f"{field} asks for up to {number} {what}; with this API key a request may ask "
                    f"for {limit}: fewer positions, layers, samples or max_tokens",
                    HTTPStatus.BAD_REQUEST,
                )


def _steers(asked: Mapping[str, Any]) -> list[str]:
    """The fields that need rows of the steering tables."""
    return [name for name in asked if "steering" in name or name in ENDING_FIELDS]


def _vectors_of(field: str, given: Any) -> int:
    """How many vectors, clamps and probes a field of a request brings."""
    if field in ("steering_module_ref", "steering_positions"):
        return 0
    if field in ENDING_FIELDS:
        return _probes_in(given)
    return sum(map(_vectors_in, _places(given)))


def _probes_in(condition: Any) -> int:
    """How many probes a condition, or a list of them, brings; a small MLP counts as its rows."""
    if isinstance(condition, Mapping):
        own = _rows_of_probe(condition["probe"]) if "probe" in condition else 0
        return own + sum(_probes_in(condition.get(kind)) for kind in ("all", "any"))
    return sum(map(_probes_in, condition)) if isinstance(condition, list) else 0


def _rows_of_probe(probe: Any) -> int:
    layers = probe.get("layers") if isinstance(probe, Mapping) else None
    if not isinstance(layers, list):
        return 1
    weights = [layer[0] for layer in layers if isinstance(layer, list) and layer]
    return max(1, sum(len(weight) for weight in weights if isinstance(weight, list)))


def _places(tier: Any) -> list[Any]:
    """What is done at each hook point and layer of a tier."""
    if not isinstance(tier, Mapping):
        return []
    found: list[Any] = []
    for layers in tier.values():
        packed = not isinstance(layers, Mapping) or "data" in layers
        found += [layers] if packed else layers.values()
    return found


def _vectors_in(entry: Any) -> int:
    if isinstance(entry, Mapping):
        indices = entry.get("layer_indices")
        vectors = len(indices) if isinstance(indices, list) else _rows_in(entry)
        return vectors + _probes_in(entry.get("when"))
    if isinstance(entry, list) and entry and isinstance(entry[0], (Mapping, list)):
        return sum(map(_vectors_in, entry))
    return 1


def _rows_in(entry: Mapping[str, Any]) -> int:
    """How many vectors an entry has; some methods take several, or matrices of them."""
    arrays = [entry[key] for key in entry.keys() - {"positions", "when"}]
    listed = [array for array in arrays if isinstance(array, list)]
    matrices = [array for array in listed if array and isinstance(array[0], list)]
    return max(1, len(listed) - len(matrices) + sum(map(len, matrices)))


UNKNOWN = -1
"""In the place of a token of which its embedding alone is known: no selection names it."""


def captured_rows(
    options: Mapping[str, tuple[Consumer, Mapping[str, Any]]],
    num_layers: int,
    tokens: list[int],
    max_tokens: int,
    num_samples: int,
    media: PromptMedia,
) -> int:
    """How many rows a prompt asks for at the most.

    Args:
        options: of each consumer that the request named.
        tokens: of the prompt; `UNKNOWN` for each row of one that was given as embeddings.
    """
    rows, prompt_len = 0, len(tokens)
    end = prompt_len + max_tokens - 1
    for consumer, chosen in options.values():
        for flow in request_flows(consumer, chosen, num_layers):
            meant = flow.selection.in_prompt(media)
            for start, stop in meant.intervals(prompt_len, tokens):
                of_prompt = max(0, min(stop, prompt_len) - start)
                generated = max(0, min(stop, end) - max(start, prompt_len))
                rows += len(flow.places) * (of_prompt + num_samples * generated)
    return rows


def read_limits(path: Path) -> dict[str, Limits]:
    """The limits of a JSON file, see `parse_limits`. Raises `OSError` and `ValueError`."""
    return parse_limits(json.loads(path.read_text(), object_pairs_hook=_once))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name stands twice: of two, the first would say nothing."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{_shown(name)!r} stands {count} times in one object; give it once")
    return dict(pairs)


def _shown(key: str) -> str:
    """A key as one may tell it."""
    return key if len(key) < 8 or key in (*Limits.model_fields, "default") else f"{key[:6]}..."


def parse_limits(given: Any) -> dict[str, Limits]:
    """Limits by the SHA-256 of an API key, and first, by an empty text, those of everybody else.

    Args:
        given: `{"default": limits, "keys": {key: limits}}`; a key is as callers send it, or
            `sha256:` and its digest in hexadecimal digits.

    Raises `ValueError` naming what is wrong.
    """
    if not isinstance(given, Mapping) or not set(given) <= {"default", "keys"}:
        raise ValueError('limits are {"default": {...}, "keys": {"KEY": {...}}}, and nothing else')
    keys = given.get("keys", {})
    if not isinstance(keys, Mapping):
        raise ValueError("keys is not an object; give limits by API key")
    found = {"": _limits("default", given.get("default", {}))}
    for key, limits in keys.items():
        shown = f"keys[{_shown(key)!r}]"
        if not is_sendable(key):
            raise ValueError(
                f"{shown}: no caller can send it; a key is printable ASCII, without spaces at its "
                "ends (those without one share default)"
            )
        digest = key.removeprefix(_SHA256).lower() if key.startswith(_SHA256) else _digest(key)
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{shown}: after {_SHA256} come 64 hexadecimal digits")
        if digest in found:
            raise ValueError(f"{shown} is there by its {_SHA256} too; give it once")
        found[digest] = _limits(shown, limits)
    return found


def _limits(name: str, given: Any) -> Limits:
    """The limits of one caller; `ValueError` says whose are wrong, and what."""
    try:
        return Limits.model_validate(given)
    except ValidationError as error:
        wrong = [".".join([name, *map(str, each["loc"])]) for each in error.errors()]
        said = [each["msg"].lower() for each in error.errors()]
        told = "; ".join(f"{where}: {what}" for where, what in zip(wrong, said, strict=True))
        known = ", ".join(Limits.model_fields)
        raise ValueError(f"{told} (there are {known})") from None


class LimitsByKey:
    """Limits of all callers, and what they have in flight, in all processes of a server.

    Everybody without a key of his own shares what is allowed by default.

    Args:
        limits: see `parse_limits`.
        folder: the same for all processes.
    """

    def __init__(self, limits: Mapping[str, Limits], folder: Path) -> None:
        self._limits = list(limits.values())
        self._digests = [digest.encode() for digest in limits][1:]
        most = max(each.configurations or 0 for each in self._limits)
        self._counts = SharedCounts(folder, len(self._limits), most)
        self._ways: list[Counter[int]] = [Counter() for _ in self._limits]

    @classmethod
    def read(cls, path: Path | None, folder: Path) -> LimitsByKey:
        """From a JSON file; without one nothing is limited."""
        return cls(parse_limits({}) if path is None else read_limits(path), folder)

    def caller(self, headers: Mapping[str, str]) -> int:
        """Which caller sent a request: 0 for everybody whose key is not known here."""
        given = _digest(bearer_key(headers)).encode()
        found = 0
        for number, digest in enumerate(self._digests, 1):  # all of them: no time tells which
            if hmac.compare_digest(digest, given):
                found = number
        return found

    def of(self, caller: int) -> Limits:
        """What a caller may ask."""
        return self._limits[caller]

    def begin(self, caller: int, asked: Mapping[str, Any]) -> Callable[[], None]:
        """A request that asks for interventions begins; call what is returned when it has ended.

        Raises `FieldError` when the caller has too many in flight.
        """
        limits, ways, steers = self._limits[caller], self._ways[caller], _steers(asked)
        key = 0
        if steers and limits.configurations is not None:
            way = json.dumps({name: asked[name] for name in steers}, sort_keys=True)
            digest = hashlib.sha256(way.encode()).digest()
            key = int.from_bytes(digest[:8], "little", signed=True) or 1
        new = key if key and not ways[key] else 0
        self._counts.begin(caller, new)
        requests, configurations = self._counts.totals(caller)
        for number, limit, what, fields in (
            (requests, limits.requests, "requests with interventions in flight", list(asked)),
            (new and configurations, limits.configurations, "ways of steering in flight", steers),
        ):
            if limit is not None and number > limit:
                self._counts.end(caller, new)
                raise FieldError(
                    fields[0],
                    f"{fields[0]}: with this API key {limit} {what} are allowed at a time; wait "
                    "until one has ended",
                    HTTPStatus.TOO_MANY_REQUESTS,
                )
        if key:
            ways[key] += 1

        def end() -> None:
            gone = 0
            if key:
                ways[key] -= 1
                if not ways[key]:
                    del ways[key]
                    gone = key
            self._counts.end(caller, gone)

        return end


class SharedCounts:
    """Requests and ways of steering in flight by caller, over the processes of a server.

    Each process writes a file of its own, and reads those of the processes that live: of each
    caller how many requests, and which ways, 0 for none.

    Args:
        ways: the most of a caller; one more has a place until it is refused.
    """

    def __init__(self, folder: Path, callers: int, ways: int) -> None:
        self._folder = folder
        self._shape = (callers, 2 + ways)
        self._own = np.zeros(self._shape, np.int64)
        self._others: dict[Path, np.ndarray] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{start_time(os.getpid())}"
        self._path.write_bytes(bytes(self._own.nbytes))
        self._own = self._mapped(self._path)

    def begin(self, caller: int, way: int) -> None:
        """A request has begun; `way`: of steering that this process did not have, or 0."""
        self._own[caller, 0] += 1
        if way:
            own = self._own[caller, 1:]
            own[np.flatnonzero(own == 0)[0]] = way

    def end(self, caller: int, way: int) -> None:
        """A request has ended; `way`: of steering that this process has no more, or 0."""
        self._own[caller, 0] -= 1
        if way:
            own = self._own[caller, 1:]
            own[own == way] = 0

    def totals(self, caller: int) -> tuple[int, int]:
        """Requests and ways of steering in flight."""
        found = [self._own[caller]]
        there = self._folder.iterdir() if self._folder.is_dir() else ()  # if nobody has cleaned up
        for path in {*self._others, *there}:
            told = re.fullmatch(r"(\d+)-(\d+)", path.name)
            if path == self._path or told is None:  # a file system may leave names of its own
                continue
            pid, started = map(int, told.groups())
            if start_time(pid) != started:  # it is gone, and what it had with it
                path.unlink(missing_ok=True)
                self._others.pop(path, None)
                continue
            if path not in self._others:
                if path.stat().st_size != self._own.nbytes:  # not written yet
                    continue
                self._others[path] = self._mapped(path)
            found.append(self._others[path][caller])
        ways = {way for counts in found for way in counts[1:][counts[1:] != 0].tolist()}
        return sum(int(counts[0]) for counts in found), len(ways)

    def _mapped(self, path: Path) -> np.ndarray:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        return np.frombuffer(memory, np.int64).reshape(self._shape)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
