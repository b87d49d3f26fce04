"""Patches as the user's process knows them: which rows the workers keep, and what requests make of
them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from tllm.client.facts import Facts
from tllm.consumers.patch_runs import FOR_RUNS_ALONE
from tllm.spec.patching import KEPT, KeptRows, Patch, PatchUse, RequestPatch, noise_rows
from tllm.spec.reading import FloatArray, said_of

_NUMBER_BYTES = 4
"""Of a number of a row on its way."""


class PatchComposer:
    """Finds what the patches of requests name, and checks them against the engine.

    Attributes:
        facts: None until the workers have told.
        kept: what the workers keep, by name.
        computed: uids of the runs that are computed now, for this front end.
    """

    def __init__(self) -> None:
        self.facts: Facts | None = None
        self.kept: dict[str, KeptRows] = {}
        self.computed: set[str] = set()
        self._composed: WeakKeyDictionary[RequestPatch, tuple[PatchUse, ...]] = WeakKeyDictionary()

    def learn(self, key: str, value: bytes | None) -> None:
        """Know what is kept, or was dropped."""
        name = key[len(KEPT) :]
        if value is None:
            self.kept.pop(name, None)
        else:
            self.kept[name] = pickle.loads(value)
        self._composed.clear()

    def check_run(self, uid: object) -> None:
        """Refuse a request that keeps rows for a run which nobody computes: they would stay on the
        device, where nobody counts them."""
        if not isinstance(uid, str) or uid not in self.computed:
            raise ValueError(FOR_RUNS_ALONE)

    def find(self, name: str, field: str) -> KeptRows:
        if name not in self.kept:
            raise ValueError(
                f"{field}: nothing is kept under the name {name!r}; kept are "
                f"{', '.join(sorted(self.kept)) or 'no rows'}. Use llm.patching.run or "
                "llm.patching.register_mean"
            )
        return self.kept[name]

    def uses(self, asked: RequestPatch) -> tuple[PatchUse, ...]:
        """What a request carries of its patches. Raises `ValueError` naming what is wrong."""
        composed = self._composed.get(asked)
        if composed is None:
            self._limit(asked.entries)  # before noise is drawn
            composed = tuple(map(self._use, asked.entries))
            for use in composed:
                use.digest  # noqa: B018 - computed once, for all requests that ask the same
            self._composed[asked] = composed
        return composed

    def _use(self, patch: Patch) -> PatchUse:
        facts, source, name = self.facts, patch.source, patch.name
        assert facts is not None
        with said_of(name):
            facts.points.check(patch.point, patch.layer)
        layer = None if patch.layer is None else patch.layer % facts.points.num_layers
        if patch.mask is not None and max(patch.mask) >= facts.hidden_size:
            raise ValueError(
                f"{name}['mask'] has {max(patch.mask)}; the model's hidden size is "
                f"{facts.hidden_size}, so dimensions go up to {facts.hidden_size - 1}"
            )
        mask = patch.mask
        if patch.heads is not None:
            assert layer is not None
            split = facts.points.heads[patch.point, layer]
            if max(patch.heads) >= split.num_heads:
                raise ValueError(
                    f"{name}['heads'] has {max(patch.heads)}; layer {layer} has heads 0 to "
                    f"{split.num_heads - 1}"
                )
            mask = split.dimensions(patch.heads)
        rows, kept = source.rows, None
        if source.kind == "noise":
            rows = noise_rows(source.std, source.seed, patch.positions, facts.hidden_size)
        elif source.kept:
            kept = self._kept(patch, (patch.point.value, layer))
        if rows is not None:
            self._check_rows(rows, patch)
            rows = facts.widened(rows)
        return PatchUse(
            patch.point.value,
            layer,
            patch.positions,
            patch.keep,
            patch.alpha,
            mask,
            None if rows is None else rows.tobytes(),
            kept,
        )

    def _kept(
        self, patch: Patch, place: tuple[str, int | None]
    ) -> tuple[str, tuple[int, ...]] | None:
        """Which rows that are kept are meant."""
        source, field = patch.source, f"{patch.name}['source'][{patch.source.kind!r}]"
        kept = self.find(source.kept, field)
        if source.uid not in ("", kept.uid):
            raise ValueError(
                f"{field}: the {kept.kind} that was given was dropped, and {kept.name!r} is the "
                "name of another now; give that, or its name"
            )
        if kept.kind != source.kind:
            raise ValueError(
                f"{field}: {kept.name!r} is a {kept.kind}; give {{{kept.kind!r}: {kept.name!r}}}"
            )
        if kept.kind == "mean":
            kept.check(place, (), field)
            return kept.uid, (0,) * len(patch.positions)
        wanted = source.positions or patch.positions
        kept.check(place, wanted, field)
        return kept.uid, tuple(position % kept.num_positions for position in wanted)

    def _check_rows(self, rows: FloatArray, patch: Patch) -> None:
        facts, field = self.facts, f"{patch.name}['source'][{patch.source.kind!r}]"
        assert facts is not None
        if rows.shape[1] not in facts.widths_at(patch.point, patch.layer):
            raise ValueError(
                f"{field} has rows of {rows.shape[1]} numbers; the model's hidden size is "
                f"{facts.hidden_size}"
            )
        largest = float(abs(rows).max())
        if largest > facts.max_value or largest * abs(patch.alpha) > facts.max_reach:
            raise ValueError(
                f"{field} has values up to {largest:.3g}, with alpha={patch.alpha:.3g}; this model "
                f"can use rows up to {min(facts.max_value, facts.max_reach):.3g}: give smaller ones"
            )

    def _brought(self, patch: Patch) -> int:
        """Bytes of the rows that a patch brings."""
        facts, source = self.facts, patch.source
        assert facts is not None
        if source.kind == "noise":
            return len(patch.positions) * facts.hidden_size * _NUMBER_BYTES
        if source.rows is not None:
            return len(source.rows) * facts.hidden_size * _NUMBER_BYTES
        kept = self.kept.get(source.kept)
        on_host = kept is not None and kept.on_host
        return len(patch.positions) * facts.row_bytes if on_host else 0

    def _limit(self, patches: Iterable[Patch]) -> None:
        assert self.facts is not None
        brought = sum(map(self._brought, patches))
        if brought > self.facts.max_patch_mib << 20:
            raise ValueError(
                f"patch brings {brought / 2**20:.1f} MiB of rows, and max_patch_mib="
                f"{self.facts.max_patch_mib}; let the workers keep them on the device "
                "(llm.patching.run), or start the engine with a larger max_patch_mib"
            )
