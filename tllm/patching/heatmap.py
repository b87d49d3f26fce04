"""The picture of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tllm.patching.metrics import FloatArray

_CELL, _MARGIN, _TEXT = 28, 12, 13
_NEGATIVE, _NONE, _POSITIVE = np.array([[33, 102, 172], [247, 247, 247], [178, 24, 43]], float)
_LACKING = (220, 220, 220)
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".pdf")
"""Of the formats that Pillow writes such a picture in."""


@dataclass(frozen=True)
class Heatmap:
    """Values by layer and position: red above 0, blue below, grey where there are none.

    Attributes:
        title: what is measured.
        hooks: one part each, below each other.
        layers, labels: of the rows and columns of each part.
        values: `[hooks, layers, positions]`.
    """

    title: str
    hooks: Sequence[str]
    layers: Sequence[int]
    labels: Sequence[str]
    values: FloatArray

    @property
    def largest(self) -> float:
        """The value that has the full colour."""
        known = np.abs(self.values[~np.isnan(self.values)])
        return float(known.max()) if len(known) and known.max() > 0 else 1.0

    def colour(self, value: float) -> tuple[int, ...]:
        """Red, green and blue of a value."""
        if np.isnan(value):
            return _LACKING
        share = min(1.0, abs(value) / self.largest)
        end = _POSITIVE if value > 0 else _NEGATIVE
        return tuple(int(part) for part in np.round(_NONE + share * (end - _NONE)))

    def cell(self, hook: int, layer: int, position: int) -> tuple[int, int]:
        """The middle of a cell in the picture."""
        x = self._left + position * _CELL + _CELL // 2
        return x, self._top(hook) + layer * _CELL + _CELL // 2

    def save(self, path: Path) -> None:
        """Write it, in the format of the path's ending. Raises `ValueError` for one in which it is
        not written."""
        if path.suffix.lower() not in _ENDINGS:
            raise ValueError(f"path={str(path)!r}: a heatmap's name ends in {', '.join(_ENDINGS)}")
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise ImportError(
                "a heatmap is drawn with Pillow, which is not installed: pip install pillow, or "
                "use .frame or .values"
            ) from None
        width = self._left + len(self.labels) * _CELL + _MARGIN
        picture = Image.new("RGB", (max(width, 320), self._top(len(self.hooks))), "white")
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_TEXT)
        for number, hook in enumerate(self.hooks):
            self._part(draw, font, number, hook)
        picture.save(path)

    @property
    def _left(self) -> int:
        return _MARGIN + 5 * _TEXT

    @property
    def _below(self) -> int:
        """Room for the labels, which are written upwards."""
        return _MARGIN + (max(map(len, self.labels), default=0) * _TEXT * 2) // 3

    def _top(self, hook: int) -> int:
        part = len(self.layers) * _CELL + self._below + 3 * _TEXT
        return _MARGIN + 2 * _TEXT + hook * part

    def _part(self, draw: Any, font: Any, hook: int, name: str) -> None:
        from PIL import Image, ImageDraw

        title = f"{name}: {self.title}, up to {self.largest:.3g}"
        draw.text((_MARGIN, self._top(hook) - 2 * _TEXT), title, "black", font)
        for layer, number in enumerate(self.layers):
            x, y = self.cell(hook, layer, 0)
            draw.text((_MARGIN, y - _TEXT // 2), f"layer {number}", "black", font)
            for position in range(len(self.labels)):
                x, y = self.cell(hook, layer, position)
                corners = (x - _CELL // 2, y - _CELL // 2, x + _CELL // 2 - 1, y + _CELL // 2 - 1)
                draw.rectangle(corners, self.colour(self.values[hook, layer, position]))
        bottom = self._top(hook) + len(self.layers) * _CELL + 2
        for position, label in enumerate(self.labels):
            strip = Image.new("L", (max(1, self._below), _TEXT + 3), 0)
            ImageDraw.Draw(strip).text((0, 0), label, 255, font)
            turned = strip.rotate(-90, expand=True)
            x, _ = self.cell(hook, 0, position)
            draw.bitmap((x - turned.width // 2, bottom), turned, "black")
