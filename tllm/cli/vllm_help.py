"""`tllm serve --help=GROUP`: what vLLM's command of the same name says of its options, one group of
them at a time."""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperCommand

from tllm.engine import launch

_ASKED = "--help="


class VllmCommand(TyperCommand):
    """A command that becomes vLLM's `--help=GROUP` where that is asked for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for argument in args:
            if argument.startswith(_ASKED) and not ctx.resilient_parsing:
                from tllm.cli import serving

                command = [sys.executable, *launch.command(str(ctx.info_name)), argument]
                serving.run(command, {})
                ctx.exit()
        return super().parse_args(ctx, args)
