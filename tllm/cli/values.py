"""Values of options as a command line gives them. Each raises `ValueError` naming the option."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from tllm.spec.layers import Layers
from tllm.spec.reading import scalar, typed


def several(text: str) -> list[str]:
    """What is between commas, without the spaces beside them."""
    return [each.strip() for each in text.split(",")]


def reals(option: str, text: str) -> list[float]:
    """Numbers as a command line gives them."""
    try:
        found = [float(number) for number in several(text)]
    except ValueError:
        raise ValueError(f"{option} {text!r}: give numbers with commas between") from None
    return [scalar(number, option) for number in found]


def places(option: str, text: str) -> list[tuple[str, Layers]]:
    """Hook points with their layers as a command line gives them."""
    found = []
    for each in several(text):
        hook, _, layer = each.partition(":")
        if not layer:
            raise ValueError(f"{option}={text!r}: {each!r} has no layer; give such as mlp_in:3")
        found.append((hook, Layers.parse(layer, option)))
    return found


def layers_of_file(text: str) -> list[int] | None:
    """Layers as a command line gives them, by number; None for all that a file has."""
    chosen = Layers.parse(text, "--layers")
    return None if chosen.is_all else list(chosen.numbers("--layers"))


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers as a command line gives them."""
    try:
        return [int(number) for number in several(text)]
    except ValueError:
        raise ValueError(f"{option} {text!r}: give whole numbers with commas between") from None


def positions(text: str) -> Any:
    """Positions as a command line gives them."""
    text = text.strip()
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--positions {text!r} is no JSON: {error}") from None
    if text[:1].isdigit() or text[:1] == "-":
        return whole_numbers("--positions", text)
    return text


def engine_arguments(given: list[str] | None, *taken: str) -> dict[str, Any]:
    """What `--engine-arg` says; `ValueError` for those that the command itself gives."""
    arguments = dict(map(engine_argument, given or ()))
    for name in ("model", *taken):
        if name in arguments:
            raise ValueError(f"--engine-arg {name!r} is the command's own; leave it out")
    return arguments


def engine_argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--engine-arg {text!r} is not NAME=VALUE")
    return name, typed(value)


def no_further(given: Sequence[str], command: str, options: Sequence[str]) -> None:
    """Refuse what a command line has beside the options of its command.

    Args:
        given: that.
        options: those of the command, which has `--engine-arg`.
    """
    if not given:
        return
    name, _, _ = given[0].partition("=")
    if not name.startswith("-"):
        raise ValueError(f"tllm {command} takes no {name!r} there; did an option lose its name?")
    close = get_close_matches(name, options, 1, 0.8)
    meant = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(
        f"tllm {command} has no option {name}{meant}; arguments of the engine are given as "
        "--engine-arg NAME=VALUE, such as --engine-arg enforce_eager=true"
    )
