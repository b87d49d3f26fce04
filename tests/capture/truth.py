"""What a capture must give, from `transformers` and from a second reading of the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from engine.asking import RELATIVE, error_of
from engine.reference import LAYERS, Place, Reference

POINTS = (
    "embed",
    "pre_attn",
    "attn_in",
    "attn_heads",
    "attn_out",
    "post_attn",
    "mlp_in",
    "mlp_out",
    "post_block",
    "lm_head_in",
)
WITHOUT_LAYER = ("embed", "lm_head_in")
PLACES: list[Place] = [
    (point, layer)
    for point in POINTS
    for layer in ([None] if point in WITHOUT_LAYER else range(LAYERS))
]


class Truth:
    """Activations of whole sequences, each computed once."""

    def __init__(self, path: str) -> None:
        self.reference = Reference(path)
        self._states: dict[tuple[int, ...], dict[Place, torch.Tensor]] = {}

    def states(self, tokens: Sequence[int]) -> dict[Place, torch.Tensor]:
        key = tuple(tokens)
        if key not in self._states:
            self._states[key] = self.reference.run(key, PLACES)[1]
        return self._states[key]

    def check(self, output: Any, asked: Mapping[str, Any]) -> int:
        """Every completion of an output has the rows that were asked for; how many there were."""
        rows = 0
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids][:-1]
            result = completion.capture_results["memory"]
            assert (result.status, result.error) == ("ok", None)
            positions = meant(asked.get("positions", "all"), len(output.prompt_token_ids), tokens)
            places = located(asked["hooks"])
            found = completion.activations
            assert {(p, n) for p, layers in found.items() for n in layers} == set(places)
            for point, layer in places:
                got = found[point][layer]
                assert got.positions.tolist() == positions, (output.request_id, asked)
                expected = self.states(tokens)[point, layer][positions]
                how = asked.get("reduction", "none")
                if how != "none":
                    expected = reduced(expected, how)
                assert got.tensor.shape == expected.shape
                for mine, theirs in zip(got.tensor, expected, strict=True):
                    error = error_of(mine, theirs)
                    assert error < RELATIVE, f"{point} {layer} of {asked} is off by {error}"
                rows += len(expected)
        return rows


def reduced(rows: torch.Tensor, how: str) -> torch.Tensor:
    if not len(rows):
        return rows
    return {"mean": rows.mean(0), "max": rows.amax(0), "last": rows[-1]}[how][None]


def located(hooks: Mapping[str, Any]) -> list[Place]:
    places: list[Place] = []
    for point, layers in hooks.items():
        if point in WITHOUT_LAYER:
            places.append((point, None))
            continue
        if layers == "all":
            layers = range(LAYERS)
        elif isinstance(layers, str):
            low, high = layers.split(":")
            layers = range(LAYERS)[int(low) if low else None : int(high) if high else None]
        places += [(point, layer % LAYERS) for layer in layers]
    return places


def meant(positions: Any, prompt_len: int, tokens: Sequence[int]) -> list[int]:
    """Which positions are selected, token by token."""
    if isinstance(positions, str):
        positions = {
            "all": {},
            "all_prompt": {"phase": "prompt"},
            "all_generated": {"phase": "generation"},
            "last_prompt": {"positions": [-1]},
        }[positions]
    elif not isinstance(positions, Mapping):
        positions = {"positions": positions}
    phase = positions.get("phase", "any")
    keys = ("positions", "ranges", "windows", "token_ids")

    def meets(criteria: Mapping[str, Any], i: int) -> bool:
        def place(p: int) -> int:
            return p + prompt_len if p < 0 else p

        origin = prompt_len if phase == "generation" else 0
        return (
            i in [place(p) for p in criteria.get("positions", ())]
            or any(
                (a is None or place(a) <= i) and (b is None or i < place(b))
                for a, b in criteria.get("ranges", ())
            )
            or any(
                origin + (a or 0) <= i and (b is None or i < origin + b)
                for a, b in criteria.get("windows", ())
            )
            or tokens[i] in criteria.get("token_ids", ())
        )

    found = []
    for i in range(len(tokens)):
        if phase != "any" and (phase == "prompt") != (i < prompt_len):
            continue
        if any(key in positions for key in keys) and not meets(positions, i):
            continue
        if meets(positions.get("exclude", {}), i):
            continue
        found.append(i)
    return found
