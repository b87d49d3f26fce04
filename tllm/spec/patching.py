"""Patching: rows put in the place of a request's own, as users ask it and as requests carry it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NoReturn

import numpy as np

from tllm.spec.changes import Changes, joined
from tllm.spec.hooks import HEAD_POINTS, HookPoint, ranges
from tllm.spec.layers import layer_at
from tllm.spec.media import MODALITIES, MediaItem, PromptMedia, parse_media
from tllm.spec.reading import (
    FloatArray,
    allow_keys,
    float_array,
    hook_named,
    one_or_several,
    own_numbers,
    scalar,
    whole_number,
    whole_numbers,
)
from tllm.spec.selection import ends_of, negative_and_others, runs_of

KeptKind = Literal["run", "mean"]

_FIELDS = ("hook", "layer", "positions", "source", "alpha", "mask", "heads")
_SOURCES = ("tensor", "zero", "mean", "noise", "run")


KEPT = "kept:"
"""The beginning of the keys under which the workers say which rows they keep."""

PATCHING = "patching"
"""Under which results say what of a patch was not done."""

ALL_PROMPT, LAST_PROMPT = "all_prompt", "last_prompt"
"""Positions that have a name; others of `Selection`'s are of generated tokens, too."""

_TOLD = 4
"""Runs of positions that a message names."""


@dataclass(frozen=True)
class KeptRows:
    """Rows that the workers keep under a name, for patches to refer to.

    Attributes:
        name: what requests call them.
        uid: theirs alone: others that are kept later under the same name have another.
        kind: rows of a run, one for each token of its prompt; or one mean row at each place.
        places: hook points with their layers.
        num_positions: rows at each place.
        num_bytes: what they take, on all workers together.
        on_host: they are in the host's memory, and requests take what they need to the device.
    """

    name: str
    uid: str
    kind: KeptKind
    places: tuple[tuple[str, int | None], ...]
    num_positions: int
    num_bytes: int
    on_host: bool = False

    def check(self, place: tuple[str, int | None], positions: Collection[int], field: str) -> None:
        """Refuse a place, or positions, of which nothing is kept."""
        if place not in self.places:
            has = ", ".join(hook if at is None else f"{hook}:{at}" for hook, at in self.places)
            hook, layer = place
            raise ValueError(
                f"{field}: {self.kind} {self.name!r} has no rows of {hook!r} at layer {layer} (it "
                f"has {has:.400}); patch one of these, or make the {self.kind} with that hook"
            )
        for position in ends_of(positions):
            if not -self.num_positions <= position < self.num_positions:
                raise ValueError(
                    f"{field}: position {position} is out of range for {self.kind} {self.name!r} "
                    f"of {self.num_positions} tokens; give {-self.num_positions} to "
                    f"{self.num_positions - 1}"
                )


@dataclass(frozen=True, eq=False)
class PatchSource:
    """What is put in the place of rows.

    Attributes:
        kind: `tensor`, `zero`, `mean`, `noise` or `run`.
        rows: of a tensor: float32 `[1 or positions, hidden]`.
        kept: the name of a mean, or of a run.
        uid: theirs, where not only the name was given.
        positions: of a run: which of its rows; None for those that are patched.
    """

    kind: str
    rows: FloatArray | None = None
    kept: str = ""
    uid: str = ""
    positions: tuple[int, ...] | None = None
    std: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, given: Any, count: int | None, name: str) -> PatchSource:
        """A source as users write it.

        Args:
            count: positions that are patched; None while that is not known.
        """
        chosen = [kind for kind in _SOURCES if isinstance(given, Mapping) and kind in given]
        if len(chosen) != 1:
            raise ValueError(
                f"{name} is {given!r:.60}; give one of {{'tensor': rows}}, {{'zero': True}}, "
                "{'mean': name}, {'noise': std, 'seed': n} and {'run': run, 'positions': [...]}"
            )
        kind = chosen[0]
        allowed = {kind, *{"noise": ("seed",), "run": ("positions",)}.get(kind, ())}
        allow_keys(given, allowed, name, repr(kind))
        value, field = given[kind], f"{name}[{kind!r}]"
        if kind == "tensor":
            return cls(kind, rows=_rows(value, count, field))
        if kind == "zero":
            if value is not True:
                raise ValueError(f"{field} is {value!r:.60}; give True, or another source")
            return cls(kind)
        if kind == "noise":
            std = scalar(value, field)
            if std < 0:
                raise ValueError(f"{field} is {std}; a standard deviation is 0 or more")
            return cls(kind, std=std, seed=_seed(given.get("seed", 0), f"{name}['seed']"))
        kept, uid = (value.name, value.uid) if isinstance(value, KeptRows) else (value, "")
        if not isinstance(kept, str) or not kept:
            raise ValueError(f"{field} is {value!r:.60}; give the name of a {kind} that is kept")
        positions = None
        if kind == "run" and given.get("positions") is not None:
            positions = _positions(given["positions"], f"{name}['positions']", distinct=False)
        source = cls(kind, kept=kept, uid=uid, positions=positions)
        if count is not None:
            source.check_count(count, name)
        return source

    def check_count(self, count: int, name: str) -> None:
        """Refuse a source that has not as many rows as positions are patched."""
        if self.positions is not None and len(self.positions) != count:
            raise ValueError(
                f"{name}['positions'] has {len(self.positions)} positions, and {count} are "
                "patched; give one of the run for each, or leave them out for the same"
            )
        if self.rows is not None and len(self.rows) not in (1, count):
            _refuse_shape(self.rows, count, f"{name}[{self.kind!r}]")


@dataclass(frozen=True, eq=False)
class Patch:
    """One entry of what a request asks: `h' = (1 - alpha) h + alpha source` at some positions of
    one hook point; with noise `h' = h + alpha noise`.

    Attributes:
        name: of the field, for messages.
        layer: negative counts from the end; None for `lm_head_in`.
        positions: negative ones count from the end of the prompt.
        mask: the dimensions that change; None for all.
        heads: the heads of one of `HEAD_POINTS` that change, in the place of a mask; None without.
        media: the items of the prompt whose tokens are meant, in the place of positions.
        whole_prompt: every token of the prompt is meant, in the place of positions.
    """

    name: str
    point: HookPoint
    layer: int | None
    positions: tuple[int, ...]
    source: PatchSource
    alpha: float = 1.0
    mask: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    media: tuple[MediaItem, ...] = ()
    whole_prompt: bool = False

    @classmethod
    def parse(cls, given: Any, name: str) -> Patch:
        """An entry as users write it; raises `ValueError` naming what is wrong."""
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{name} is {type(given).__name__}; give a mapping with {', '.join(_FIELDS)}"
            )
        if unknown := sorted(set(map(str, given)) - set(_FIELDS)):
            raise ValueError(f"{name} has unknown keys {unknown}; it takes {', '.join(_FIELDS)}")
        for key in ("hook", "positions", "source"):
            if given.get(key) is None:
                raise ValueError(f"{name} has no {key!r}; give it")
        point = hook_named(given["hook"], name)
        layer = layer_at(point, given.get("layer"), name)
        where = given["positions"]
        whole_prompt = isinstance(where, str) and where == ALL_PROMPT
        if isinstance(where, str) and where == LAST_PROMPT:
            where = [-1]
        media = () if whole_prompt else _media(where, f"{name}['positions']")
        unplaced = whole_prompt or bool(media)
        positions = () if unplaced else _positions(where, f"{name}['positions']")
        count = None if unplaced else len(positions)
        source = PatchSource.parse(given["source"], count, f"{name}['source']")
        alpha = 1.0 if given.get("alpha") is None else scalar(given["alpha"], f"{name}['alpha']")
        mask = _parts(given, "mask", name, "dimensions")
        heads = _parts(given, "heads", name, "heads")
        if heads is not None and (mask is not None or point not in HEAD_POINTS):
            other = "with a mask" if mask is not None else f"at {point}"
            raise ValueError(
                f"{name}['heads'] is given {other}; give heads at {', '.join(HEAD_POINTS)}, or "
                "a mask"
            )
        return cls(name, point, layer, positions, source, alpha, mask, heads, media, whole_prompt)

    @classmethod
    def from_run(
        cls,
        place: tuple[str, int | None],
        positions: Iterable[int],
        run: KeptRows,
        heads: tuple[int, ...] | None = None,
    ) -> Patch:
        """Rows of a run at the same place and positions, all of which are known to be there."""
        hook, layer = place
        source = PatchSource("run", kept=run.name, uid=run.uid)
        return cls("patch", HookPoint(hook), layer, tuple(positions), source, heads=heads)

    @property
    def unplaced(self) -> bool:
        """Whether which positions are meant hangs on the prompt."""
        return self.whole_prompt or bool(self.media)

    def in_prompt(self, prompt_len: int, media: PromptMedia) -> Patch:
        """The same by positions, in a prompt of so many tokens with these items. Raises
        `ValueError` for items that it lacks."""
        if not self.unplaced:
            return self
        for item in self.media:
            media.check(item, f"{self.name}['positions']")
        pairs = [pair for item in self.media for pair in media.ranges(item)]
        if self.whole_prompt:
            pairs = [(0, prompt_len)]
        positions = sorted({position for pair in pairs for position in range(*pair)})
        self.source.check_count(len(positions), f"{self.name}['source']")
        return replace(self, positions=tuple(positions), media=(), whole_prompt=False)

    @property
    def keep(self) -> float:
        """The factor of the row itself."""
        return 1.0 if self.source.kind == "noise" else 1.0 - self.alpha


@dataclass(frozen=True, eq=False)
class RequestPatch:
    """All that one request asks, in the order given."""

    entries: tuple[Patch, ...]

    @classmethod
    def parse(cls, given: Any) -> RequestPatch:
        """`patch=` as users write it."""
        if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence) or not given:
            raise ValueError(
                f"patch is {given!r:.60}; give a list of mappings such as {{'hook': 'post_block', "
                "'layer': 5, 'positions': [3], 'source': {'zero': True}}"
            )
        return cls(tuple(Patch.parse(each, f"patch[{i}]") for i, each in enumerate(given)))

    @property
    def unplaced(self) -> bool:
        """Whether which positions are meant hangs on the prompt."""
        return any(entry.unplaced for entry in self.entries)

    def in_prompt(self, prompt_len: int, media: PromptMedia) -> RequestPatch:
        return RequestPatch(tuple(entry.in_prompt(prompt_len, media) for entry in self.entries))

    def unreached(self, num_rows: int) -> str | None:
        """What was not done in a sample of which so many rows were computed; None for nothing."""
        told = [
            f"{entry.name}['positions']: {ranges(beyond, _TOLD)}"
            for entry in self.entries
            if (beyond := sorted(p for p in entry.positions if p >= num_rows))
        ]
        if not told:
            return None
        return (
            f"the sample ended before positions that were to be patched ({'; '.join(told)}): the "
            f"last row that was computed is that of position {num_rows - 1}"
        )


@dataclass(frozen=True)
class PatchUse:
    """A patch in a request, with everything that it names found.

    Attributes:
        layer: counted from 0.
        positions: negative ones count from the end of the prompt.
        keep, scale: factors of the row and of the source.
        mask: the dimensions that change; None for all.
        rows: float32 `[1 or positions, hidden]`; None where the source is zero, or kept.
        kept: uid of `KeptRows`, and which of its rows for each position; None without.
    """

    hook: str
    layer: int | None
    positions: tuple[int, ...]
    keep: float
    scale: float
    mask: tuple[int, ...] | None = None
    rows: bytes | None = None
    kept: tuple[str, tuple[int, ...]] | None = None
    known_digest: str = ""

    @cached_property
    def digest(self) -> str:
        """Of what is done, and where."""
        if self.known_digest:
            return self.known_digest
        place = self.hook, self.layer, self.positions
        said = repr((place, self.keep, self.scale, self.mask, self.kept)).encode()
        return hashlib.sha256(said + (self.rows or b"")).hexdigest()[:32]

    def at(self, prompt_len: int) -> list[int]:
        """Its positions, counted from the start."""
        return [p + prompt_len if p < 0 else p for p in self.positions]

    def to_wire(self) -> list[Any]:
        """As plain data."""
        mask = None if self.mask is None else list(self.mask)
        kept = None if self.kept is None else [self.kept[0], list(self.kept[1])]
        place = self.hook, self.layer, list(self.positions)
        return [*place, self.keep, self.scale, mask, self.rows, kept, self.digest]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> PatchUse:
        hook, layer, positions, keep, scale, mask, rows, kept, digest = wire
        return cls(
            hook,
            layer,
            tuple(positions),
            keep,
            scale,
            None if mask is None else tuple(mask),
            rows,
            None if kept is None else (kept[0], tuple(kept[1])),
            digest,
        )


def patch_changes(uses: Sequence[PatchUse], prompt_len: int) -> Changes:
    """What patches do to a sequence. Which of its rows a position gets, a patch and the position
    say; of one that counts from the end of the prompt, where that is, too."""
    parts: list[Changes] = []
    for use in uses:
        from_end, from_start = negative_and_others(use.positions)
        counted = [p + prompt_len for p in from_end]
        for said, positions in (use.digest, from_start), (f"{use.digest} {prompt_len}", counted):
            done = hashlib.sha256(said.encode()).digest(), b""
            runs = runs_of(positions)
            edges = [each for run in runs for each in zip(run, done, strict=True)]
            if runs:
                parts.append(edges if runs[0][0] == 0 else [(0, b""), *edges])
    return joined(parts or [[(0, b"")]], lambda digests: b"patch" + b"".join(digests))


def check_patch_positions(
    uses: Iterable[PatchUse], prompt_len: int, max_tokens: int | None
) -> None:
    """Refuse positions at which a sequence cannot have a row, and those that are given twice.

    Args:
        max_tokens: the most tokens that are generated; None when that is not limited. The last one
            is drawn and never passes the model.
    """
    for i, use in enumerate(uses):
        for position in ends_of(use.positions):
            over = max_tokens is not None and position >= prompt_len + max_tokens - 1
            if over or position < -prompt_len:
                last = "" if max_tokens is None else f" to {prompt_len + max_tokens - 2}"
                raise ValueError(
                    f"patch[{i}]['positions']: position {position} is out of range for a prompt of "
                    f"{prompt_len} tokens and max_tokens={max_tokens}; give {-prompt_len}{last}"
                )
        from_end, from_start = negative_and_others(use.positions)
        if twice := {p + prompt_len for p in from_end}.intersection(from_start):
            one = max(twice)
            raise ValueError(
                f"patch[{i}]['positions']: {one - prompt_len} and {one} are the same position of a "
                f"prompt of {prompt_len} tokens; give it once"
            )


def noise_rows(std: float, seed: int, positions: Sequence[int], hidden: int) -> FloatArray:
    """Normal noise `[positions, hidden]`: that of a position hangs on the seed and on it alone."""
    rows = np.empty((len(positions), hidden), np.float32)
    for i, position in enumerate(positions):
        key = np.array([seed, position % 2**64], np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key))
        rows[i] = drawn.standard_normal(hidden, np.float32) * np.float32(std)
    return rows


# -- reading what users write ----------------------------------------------------------------------


def _rows(given: Any, count: int | None, name: str) -> FloatArray:
    rows = float_array(given, name)
    if rows.ndim == 1:
        rows = rows[None]
    if rows.ndim != 2 or not rows.size or (count is not None and len(rows) not in (1, count)):
        _refuse_shape(rows, count, name)
    return rows


def _refuse_shape(rows: FloatArray, count: int | None, name: str) -> NoReturn:
    patched = "" if count is None else f", and {count} positions are patched"
    raise ValueError(
        f"{name} has shape {list(rows.shape)}{patched}; give [hidden] or [positions, hidden]"
    )


def _media(given: Any, name: str) -> tuple[MediaItem, ...]:
    """The items that are given in the place of positions."""
    if isinstance(given, str) and given in MODALITIES:
        given = {given: "all"}
    if not isinstance(given, (str, Mapping)):
        return ()
    if isinstance(given, str) or not given or set(given) - set(MODALITIES):
        raise ValueError(
            f"{name} is {given!r:.60}; give a list of whole numbers, {ALL_PROMPT!r}, "
            f"{LAST_PROMPT!r}, or, of a prompt that has such items, {', '.join(MODALITIES)}, or a "
            "mapping with any of these; what is done to generated tokens, however many there are, "
            "is steering (method 'scale_dimensions' silences dimensions, or a head)"
        )
    if not (items := parse_media(given, name)):
        raise ValueError(f"{name}={given!r:.60} names no item; give 'all', or indices")
    return items


def _parts(given: Mapping[str, Any], key: str, name: str, kind: str) -> tuple[int, ...] | None:
    """Which parts of a row an entry names; None for all."""
    if given.get(key) is None:
        return None
    listed = one_or_several(own_numbers(given[key]))
    if any(isinstance(own_numbers(each), bool) for each in listed):
        raise ValueError(
            f"{name}[{key!r}] says yes or no of each; give the numbers of the {kind} that change, "
            f"as numpy.flatnonzero({key}) does"
        )
    parts = _positions(listed, f"{name}[{key!r}]")
    if min(parts) < 0:
        raise ValueError(f"{name}[{key!r}] has {min(parts)}; {kind} count from 0")
    return parts


def _positions(given: Any, name: str, *, distinct: bool = True) -> tuple[int, ...]:
    found = tuple(whole_numbers(given, name))
    if distinct and len(set(found)) < len(found):
        raise ValueError(f"{name} names a number twice; give each once")
    return found


def _seed(given: Any, name: str) -> int:
    return whole_number(given, f"{name}: ", 0, 2**63 - 1)
