"""The images, videos and sounds of a prompt, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from tllm.spec.reading import check_64_bits

MODALITIES = ("image", "video", "audio")


class MediaItem(NamedTuple):
    """One item of a prompt, or all of a kind.

    Attributes:
        number: in the order of the prompt; negative counts from the last one; None means all.
    """

    modality: str
    number: int | None = None

    def __str__(self) -> str:
        return self.modality if self.number is None else f"{self.modality} {self.number}"


@dataclass(frozen=True)
class PromptMedia:
    """Where the items of a prompt stand.

    Attributes:
        items: of each modality, in the order of the prompt: half-open stretches of positions, of
            the tokens in whose place the embeddings of the item go into the model.
    """

    items: Mapping[str, Sequence[Sequence[tuple[int, int]]]] = field(default_factory=dict)

    def ranges(self, item: MediaItem) -> list[tuple[int, int]]:
        """The positions of an item, ascending; none where the prompt lacks it."""
        there = self.items.get(item.modality, ())
        if item.number is None:
            return [pair for each in there for pair in each]
        return list(there[item.number]) if -len(there) <= item.number < len(there) else []

    def check(self, item: MediaItem, name: str) -> None:
        """Refuse an item that the prompt lacks.

        Args:
            name: of the field that names it.
        """
        if self.ranges(item):
            return
        has = ", ".join(f"{len(items)} of {kind}" for kind, items in self.items.items() if items)
        raise ValueError(
            f"{name} names the tokens of {item}, and the prompt has no such item (it has "
            f"{has or 'text alone'}); items are counted from 0 in the order of the prompt: give "
            "those that it has, or other positions"
        )


def parse_media(given: Mapping[str, Any], name: str) -> tuple[MediaItem, ...]:
    """The items that a mapping names: for any of `MODALITIES`, `"all"`, the index of an item, or a
    list of such. Its other keys are ignored. Raises `ValueError` naming what is wrong."""
    found: list[MediaItem] = []
    for modality in MODALITIES:
        chosen = given.get(modality)
        if modality not in given:
            continue
        if isinstance(chosen, str) and chosen == "all":
            found.append(MediaItem(modality))
            continue
        if isinstance(chosen, Integral):
            chosen = [chosen]
        if isinstance(chosen, (str, bytes, Mapping)) or not isinstance(chosen, Iterable):
            raise ValueError(
                f"{name}[{modality!r}]={chosen!r:.60} is not understood; give 'all', the index of "
                f"one {modality} of the prompt, counted from 0, or a list of indices"
            )
        for index in chosen:
            if isinstance(index, bool) or not isinstance(index, Integral):
                raise ValueError(
                    f"{name}[{modality!r}]: {index!r:.60} is no whole number; give indices of "
                    f"the prompt's items of {modality}, counted from 0, or 'all'"
                )
            check_64_bits(int(index), f"{name}[{modality!r}]")
            found.append(MediaItem(modality, int(index)))
    return tuple(dict.fromkeys(found))


def media_to_wire(items: Iterable[MediaItem]) -> dict[str, Any]:
    """Items as plain data, such that `parse_media` gives the same."""
    wire: dict[str, Any] = {}
    for modality, number in items:
        if number is None:
            wire[modality] = "all"
        elif wire.get(modality) != "all":
            wire.setdefault(modality, []).append(number)
    return wire
