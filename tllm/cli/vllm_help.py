"""`tllm serve --help=GROUP`: what `vllm serve` says of its options, one group of them at a time."""

from __future__ import annotations

import os
import sys
from typing import Any

from typer.core import TyperCommand

from tllm.engine import launch

_ASKED = "--help="


class ServeCommand(TyperCommand):
    """A command that becomes `vllm serve --help=GROUP` where that is asked for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for argument in args:
            if argument.startswith(_ASKED) and not ctx.resilient_parsing:
                command = [sys.executable, "-m", launch.module(), "serve", argument]
                os.execv(sys.executable, command)
        return super().parse_args(ctx, args)
