"""Path patching: which branches are kept still, and where changes arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tllm.spec.hooks import HEAD_POINTS, HookPoint, ModelPoints, ranges
from tllm.spec.patching import KeptRows, Patch
from tllm.spec.reading import hook_named, one_or_several

Place: TypeAlias = tuple[str, "int | None"]
"""A hook point and its layer."""

BRANCHES = (HookPoint.ATTN_OUT.value, HookPoint.MLP_OUT.value)
"""What can be kept still: what a layer adds to the residual stream."""

_BEFORE: Mapping[str, str] = {
    HookPoint.ATTN_IN.value: HookPoint.ATTN_OUT.value,
    **dict.fromkeys(map(str, HEAD_POINTS), HookPoint.ATTN_OUT.value),
    HookPoint.MLP_IN.value: HookPoint.MLP_OUT.value,
}
"""Points within a branch, and the branch that they are in: it carries what is put there."""

_ORDER = {point: number for number, point in enumerate(HookPoint)}


@dataclass(frozen=True)
class PathWays:
    """The ways by which a change may travel from a sender: through the residual stream, and through
    branches that are not frozen, to the receivers; to the logits where there are none.

    Goldowsky-Dill et al., "Localizing Model Behavior with Path Patching" (arXiv 2304.05969), with
    both branches frozen; Wang et al., "Interpretability in the Wild" (arXiv 2211.00593), with
    `attn_out` frozen and MLPs computed again.

    Attributes:
        freeze: the branches that are kept still, in every layer.
        receivers: what arrives there is put into a run in which nothing else is changed.
    """

    points: ModelPoints
    freeze: tuple[str, ...]
    receivers: tuple[Place, ...] = ()

    @classmethod
    def parse(cls, points: ModelPoints, freeze: Any, receivers: Sequence[Place]) -> PathWays | None:
        """As users write them; None where neither is given.

        Raises `ValueError` for what is no branch, or is not in every layer, and where blocks do
        more than add branches to a stream.
        """
        given = [] if freeze is None else one_or_several(freeze)
        named = BRANCHES if given == ["all"] else given
        chosen = [hook_named(one, "freeze") for one in named]
        names = tuple(dict.fromkeys(str(one) for one in chosen))
        if names and not points.one_stream:
            raise ValueError(
                f"freeze={given} was given, but {points.family} carries several residual streams, "
                "so that a change passes from block to block by more than branches; leave it out"
            )
        for name in names:
            if name not in BRANCHES:
                raise ValueError(
                    f"freeze: {name} is no branch that a layer adds to the stream; give "
                    f"{', '.join(BRANCHES)}, a list of them, or 'all'"
                )
            has = points.layers(HookPoint(name))
            if len(has) < points.num_layers:
                raise ValueError(
                    f"freeze: not every layer of this model has {name} (those that do: "
                    f"{ranges(has) or 'none'}), so that a change could pass the others; freeze "
                    "what every layer has"
                )
            for layer in has:
                points.check(HookPoint(name), layer)
        if alone := [hook for hook, layer in receivers if layer is None]:
            raise ValueError(
                f"receivers: {alone[0]} belongs to no layer; leave receivers out for the way to "
                "the logits"
            )
        if not names and not receivers:
            return None
        return cls(points, names, tuple(dict.fromkeys(receivers)))

    @property
    def frozen(self) -> list[Place]:
        """The branches of all layers whose rows are needed."""
        return [(name, layer) for layer in range(self.points.num_layers) for name in self.freeze]

    def leads(self, sender: Place) -> bool:
        """Whether what is put there can arrive: the sender comes before a receiver."""
        return not self.receivers or any(self._is_before(sender, each) for each in self.receivers)

    def kept_still(self, sender: Place, run: KeptRows, positions: Iterable[int]) -> list[Patch]:
        """Patches that give the branches after a sender the rows of a run."""
        hook, layer = sender
        places = [
            each
            for each in self.frozen
            if self._is_before(sender, each) and each != (_BEFORE.get(hook), layer)
        ]
        if self.receivers:  # what comes after the last is not looked at
            places = [
                each
                for each in places
                if any(self._is_before(each, receiver) for receiver in self.receivers)
            ]
        return _from(run, places, positions)

    def received(self, run: KeptRows, positions: Iterable[int]) -> list[Patch]:
        return _from(run, self.receivers, positions)

    def _is_before(self, place: Place, other: Place) -> bool:
        return self._order(place) < self._order(other)

    def _order(self, place: Place) -> tuple[int, int]:
        """Where a place is in the order of the network; one tensor has one."""
        point, layer = self.points.canonical(HookPoint(place[0]), place[1])
        return -1 if layer is None else layer, _ORDER[point]


def _from(run: KeptRows, places: Iterable[Place], positions: Iterable[int]) -> list[Patch]:
    at = tuple(positions)
    return [Patch.from_run(place, at, run) for place in places]
