"""Maps from the rows of a layer to final states, from the files of those who fit them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from tllm.spec.reading import json_mapping

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
            self._check(layer, each)
        sizes = {each.weight.shape[-1]: layer for layer, each in found.items()}
        if len(sizes) > 1:
            told = ", ".join(f"{size} (layer {layer})" for size, layer in sizes.items())
            raise ValueError(
                f"path={str(self.path)!r} has layers for rows of different widths: {told}; all of "
                "a lens are as wide as the model's hidden size"
            )
        return found

    def _check(self, layer: int, found: Translator) -> None:
        """Refuse what is no map of rows, in a file that holds whatever it likes."""
        where = f"path={str(self.path)!r}: layer {layer}"
        if layer < 0:
            raise ValueError(f"{where} is negative; layers count from 0 in a file")
        size = 0
        for name, given, dims in (("weight", found.weight, 2), ("bias", found.bias, 1)):
            if given is None and name == "bias":
                continue
            expected = f"[{', '.join(['hidden'] * dims)}] of floating-point numbers was expected"
            if not isinstance(given, torch.Tensor) or given.layout is not torch.strided:
                raise ValueError(f"{where} has {given!r:.60} as its {name}; a tensor {expected}")
            size = size or (given.shape[-1] if given.ndim else 0)
            if given.shape != (size,) * dims or not given.is_floating_point():
                raise ValueError(
                    f"{where} has a {name} of shape {list(given.shape)} and {given.dtype}; "
                    f"{expected}"
                )

    @property
    def hidden_size(self) -> int:
        """Of the model that it was fitted on."""
        return next(iter(self.layers.values())).weight.shape[-1]

    def _tuned(self, loaded: Any) -> dict[int, Translator]:
        """`h + (W h + b)`: what a translator gives is added to the row."""
        file = self.path / "config.json"
        config = json_mapping(file.read_bytes(), f"path={str(self.path)!r}: config.json")
        kind = config.get("lens_type", "linear_tuned_lens")
        if kind != "linear_tuned_lens":
            raise ValueError(
                f"path={str(self.path)!r} is of lens_type {kind!r}; 'linear_tuned_lens' is known"
            )
        names = sorted(map(str, loaded)) if isinstance(loaded, Mapping) else []
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
