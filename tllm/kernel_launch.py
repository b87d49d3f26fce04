"""Launching a Triton kernel again, as it was compiled for arguments like these before."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

_LEAST, _MOST = -(2**31), 2**31 - 1


class RepeatedLaunch:
    """A Triton kernel that is launched in every step, in the place of the kernel itself:
    `kernel[grid](*arguments, **constants)`.

    Triton finds out in Python, at each launch, which of the variants that it has compiled the
    arguments need; that takes longer than the launch. Here it does so for the first arguments of
    a kind. What makes a kind is what Triton specializes on: of a tensor its dtype and whether it is
    aligned to 16 bytes, of an integer whether it is 1, a multiple of 16, and fits 32 bits, and all
    constants.

    Args:
        kernel: made with `triton.jit`; its constants are its last parameters. An interpreted one
            is launched as ever.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._variants: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        parameters = getattr(kernel, "params", ())
        self._constants = tuple(each.name for each in parameters if each.is_constexpr)
        first = len(parameters) - len(self._constants)
        if any(each.is_constexpr for each in parameters[:first]):
            raise ValueError(f"the constants of {kernel} are not its last parameters")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        # Without a function for each: there are twenty arguments, and this is every step's.
        kind = (
            *[
                (a.dtype, a.device, a.data_ptr() & 15 == 0)
                if isinstance(a, torch.Tensor)
                else (type(a), a == 1, a & 15 == 0, _LEAST <= a <= _MOST)
                if isinstance(a, int)
                else type(a)
                for a in arguments
            ],
            *constants.items(),
        )
        known = self._variants.get(kind)
        if known is not None:
            compiled, last = known
            compiled[grid](*arguments, *last)
            return
        compiled = self.kernel[grid](*arguments, **constants)
        # An interpreted kernel gives nothing back.
        if hasattr(compiled, "launch_metadata") and len(self._variants) < 64:
            last = tuple(constants[name] for name in self._constants)
            self._variants[kind] = compiled, last
