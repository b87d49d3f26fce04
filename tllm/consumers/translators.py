"""Maps from the rows of a layer to final states, from the files of those who fit them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

LensKind = Literal["tuned", "jacobian"]

SITES: Mapping[LensKind, str] = {"tuned": "pre_attn", "jacobian": "post_block"}
"""The hook point whose rows a lens was fitted on: the tuned lens of layer i was fitted on what
enters block i, the Jacobian lens of layer i on what leaves it."""

_TUNED_NAME = re.compile(r"(\d+)\.(weight|bias)")


@dataclass(frozen=True)
class Translator:
    """The map of one layer.

    Attributes:
        weight: `[hidden, hidden]`; the row becomes `weight @ row`.
        bias: `[hidden]`, or None.
        residual: the row itself is added.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: bool = False

    def to(self, device: torch.device) -> Translator:
        bias = None if self.bias is None else self.bias.to(device)
        return Translator(self.weight.to(device), bias, self.residual)

    @property
    def is_finite(self) -> bool:
        """Whether all its numbers are finite in float32."""
        given = [each for each in (self.weight, self.bias) if each is not None]
        return all(bool(each.float().isfinite().all()) for each in given)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[rows, hidden]` float32 as final states, before the model's norm."""
        found = rows @ self.weight.float().mT
        if self.bias is not None:
            found = found + self.bias.float()
        return found + rows if self.residual else found


@dataclass(frozen=True)
class TranslatorFile:
    """A fitted lens on disk.

    Read are the folders of `tuned-lens` (`config.json` and `params.pt`), and the files of
    `jacobian-lens` (a mapping with `J`, by layer). Both are loaded without running any code.
    """

    path: Path

    @cached_property
    def kind(self) -> LensKind:
        """Whose format it is. Raises `ValueError` for anything else."""
        if (self.path / "config.json").is_file() and (self.path / "params.pt").is_file():
            return "tuned"
        if self.path.suffix == ".pt" and self.path.is_file():
            return "jacobian"
        raise ValueError(
            f"path={str(self.path)!r} is no lens; give a folder of tuned-lens with config.json and "
            "params.pt, or a .pt file of jacobian-lens"
        )

    @cached_property
    def layers(self) -> Mapping[int, Translator]:
        """By layer. Raises `ValueError` for files that are not understood."""
        try:
            file = self.path / "params.pt" if self.kind == "tuned" else self.path
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            if self.path.exists() and not isinstance(error, ValueError):
                raise ValueError(
                    f"path={str(self.path)!r} cannot be read as a file of PyTorch: {error}"
                ) from None
            raise
        except Exception as error:  # the unpickler refuses what is more than tensors
            raise ValueError(
                f"path={str(self.path)!r} holds more than tensors, or is no file of PyTorch: "
                f"{type(error).__name__}"
            ) from None
        found = self._tuned(loaded) if self.kind == "tuned" else self._jacobian(loaded)
        for layer, each in found.items():
            size = each.weight.shape[-1]
            right = each.weight.shape == (size, size) and each.weight.is_floating_point()
            if not right or (each.bias is not None and each.bias.shape != (size,)):
                raise ValueError(
                    f"path={str(self.path)!r}: layer {layer} has a weight of shape "
                    f"{list(each.weight.shape)}; [hidden, hidden] was expected"
                )
        return found

    @property
    def hidden_size(self) -> int:
        """Of the model that it was fitted on."""
        return next(iter(self.layers.values())).weight.shape[-1]

    def _tuned(self, loaded: Any) -> dict[int, Translator]:
        """`h + (W h + b)`: what a translator gives is added to the row."""
        config = json.loads((self.path / "config.json").read_text())
        kind = config.get("lens_type", "linear_tuned_lens")
        if kind != "linear_tuned_lens":
            raise ValueError(
                f"path={str(self.path)!r} is of lens_type {kind!r}; 'linear_tuned_lens' is known"
            )
        names = sorted(loaded) if isinstance(loaded, Mapping) else []
        if unknown := [name for name in names if not _TUNED_NAME.fullmatch(name)]:
            raise ValueError(
                f"path={str(self.path)!r} has parameters {', '.join(unknown[:5])}; those of a "
                "linear tuned lens are '0.weight', '0.bias' and so on"
            )
        layers = sorted({int(name.partition(".")[0]) for name in names})
        lacking = [layer for layer in layers if f"{layer}.weight" not in loaded]
        if not layers or lacking:
            raise ValueError(
                f"path={str(self.path)!r} has no weight of layer {lacking[0] if lacking else 0}"
            )
        return {
            layer: Translator(loaded[f"{layer}.weight"], loaded.get(f"{layer}.bias"), residual=True)
            for layer in layers
        }

    def _jacobian(self, loaded: Any) -> dict[int, Translator]:
        """`J h`."""
        matrices = loaded.get("J") if isinstance(loaded, Mapping) else None
        if not isinstance(matrices, Mapping) or not all(type(layer) is int for layer in matrices):
            has = sorted(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
            raise ValueError(
                f"path={str(self.path)!r} is no file of jacobian-lens, which has 'J' by layer; it "
                f"has {has}"
            )
        if not matrices:
            raise ValueError(f"path={str(self.path)!r} has no layers in 'J'")
        return {layer: Translator(matrices[layer]) for layer in sorted(matrices)}
