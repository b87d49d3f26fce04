"""LoReFT interventions, as `pyreft` saves them: `ReftModel.save(folder)`.

A folder with `config.json` and one `intkey_*.bin` for each place, in which `torch.save` put
`weight` `[rank, hidden]`, `bias` `[rank]` and `rotate_layer` `[hidden, rank]`. Layer and component
are in the file's name: `layer.15.repr.block_output.unit.pos.nunit.1#0`, and with newer versions
`layer_15_comp_block_output_unit_pos_nunit_1#0` or
`comp_model_layers[15]_output_unit_pos_nunit_1#0` (pyvene's `IntervenableModel.save`). The last
number tells interventions at one place apart: one that was trained at the first tokens and one at
the last, as pyreft's `f7+l7` has them unless they share their weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import float_array, json_mapping, said_of
from tllm.steering.formats.arrays import restored

_NAME = re.compile(
    r"intkey_(?:layer[._](?P<layer>\d+)[._])?(?:repr|comp)[._](?P<component>.+)"
    r"[._]unit[._](?P<unit>\w+?)"
    r"[._]nunit[._]\d+#(?P<number>\d+)\.bin"
)
_COMPONENTS: Mapping[str, HookPoint] = {
    "block_input": HookPoint.PRE_ATTN,
    "attention_input": HookPoint.ATTN_IN,
    "attention_output": HookPoint.ATTN_OUT,
    "mlp_input": HookPoint.MLP_IN,
    "mlp_output": HookPoint.MLP_OUT,
    "block_output": HookPoint.POST_BLOCK,
}
_BLOCK = re.compile(r"(?:model[._]layers|transformer[._]h)\[(\d+)\][._]output")
_NEEDED = {"weight", "bias", "rotate_layer"}


def load_reft(
    folder: str | PathLike[str], *, strength: float = 1.0, positions: Any = None
) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """What a folder of `pyreft` does, as a spec for `steering_vectors` and the like.

    LoReFT is trained at some tokens of the prompt only, such as the last one, which its files do
    not say: give them as `positions`, or steer with `prefill_steering_vectors`. Its activation is
    taken to be the linear one, which files do not say either.

    Args:
        folder: has `config.json` and `intkey_*.bin`. They are read with `weights_only=True`, so
            that they cannot run code.
        strength: how much of each is done.
        positions: of every entry, see `SamplingParams.steering_positions`; None for none of its
            own. Where several interventions are at one place, `{0: ..., 1: ...}`: those of each,
            by the number after `#` in its file's name, which begins anew at every place.

    Raises:
        ValueError: another kind of intervention than LoReFT, several at one place without
            positions of their own, a component or a file that is not understood; the sentence
            says what was found and what is read.
    """
    path = Path(folder)
    with said_of(str(path)):
        return _read(path, strength, positions)


def is_folder(path: Path) -> bool:
    """Whether `pyreft` wrote it, as far as the names of its files say."""
    return (path / "config.json").is_file() and any(path.glob("intkey_*.bin"))


def _read(
    folder: Path, strength: float, positions: Any
) -> dict[str, dict[int, list[dict[str, Any]]]]:
    if not is_folder(folder):
        raise ValueError(
            "it is no folder of pyreft, which has config.json and intkey_*.bin (ReftModel.save)"
        )
    config = json_mapping((folder / "config.json").read_bytes(), "its config.json")
    kinds = config.get("intervention_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"its config.json has intervention_types {kinds!r:.60}; it is a list")
    for kind in kinds:
        if "Loreft" not in str(kind):
            raise ValueError(
                f"it has an intervention of {kind}; those of LoreftIntervention are read"
            )
    places: dict[tuple[HookPoint, int], dict[int, Path]] = {}
    for file in sorted(folder.glob("intkey_*.bin")):
        point, layer, number = _place(file.name)
        files = places.setdefault((point, layer), {})
        if number in files:
            raise ValueError(
                f"its files {files[number].name} and {file.name} are both number {number} at "
                f"{point} of layer {layer}, so that which comes first is not known"
            )
        files[number] = file
    spec: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for (point, layer), files in sorted(places.items()):
        chosen = _positions(positions, sorted(files), f"{point} of layer {layer}")
        spec.setdefault(str(point), {})[layer] = [
            {"method": "low_rank", **dict(_arrays(file)), "strength": strength, **chosen[number]}
            for number, file in sorted(files.items())
        ]
    return spec


def _positions(given: Any, numbers: Sequence[int], place: str) -> dict[int, dict[str, Any]]:
    """What each intervention at a place says of positions, by its number."""
    by_number = isinstance(given, Mapping) and any(isinstance(key, int) for key in given)
    if by_number:
        if set(given) != set(numbers):
            raise ValueError(
                f"positions has the numbers {list(given)}, and its files have {list(numbers)} "
                f"at {place}"
            )
        return {number: {"positions": given[number]} for number in numbers}
    if len(numbers) > 1:
        each = ", ".join(f"{number}: ..." for number in numbers)
        raise ValueError(
            f"at {place} it has {len(numbers)} interventions, each trained at tokens of its own, "
            "as pyreft does for positions such as f7+l7 unless their weights are shared; give "
            f"positions={{{each}}}, by the number after # in the names of its files"
        )
    return {number: {} if given is None else {"positions": given} for number in numbers}


def _place(name: str) -> tuple[HookPoint, int, int]:
    found = _NAME.fullmatch(name)
    if found is None or found["unit"] != "pos":
        raise ValueError(
            f"its file {name} is none of intkey_layer.N.repr.COMPONENT.unit.pos.nunit.K#I.bin, or "
            "intkey_layer_N_comp_COMPONENT_unit_pos_nunit_K#I.bin"
        )
    layer, component, number = found["layer"], found["component"], int(found["number"])
    if block := _BLOCK.fullmatch(component):
        return HookPoint.POST_BLOCK, int(block[1]), number
    if component not in _COMPONENTS or layer is None:
        raise ValueError(
            f"its file {name} is for the component {component!r}; those that are read are "
            f"{', '.join(_COMPONENTS)} and model.layers[N].output"
        )
    return _COMPONENTS[component], int(layer), number


def _arrays(file: Path) -> Iterator[tuple[str, Any]]:
    saved = restored(file)
    if not isinstance(saved, Mapping) or set(saved) != _NEEDED:
        names = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"its file {file.name} holds {names}; LoReFT's hold {sorted(_NEEDED)}")
    for name in sorted(_NEEDED):
        if not isinstance(saved[name], torch.Tensor):
            raise ValueError(
                f"its file {file.name} has {name} as a {type(saved[name]).__name__}; each is a "
                "tensor"
            )
    arrays = {name: float_array(saved[name], f"its file {file.name}: {name}") for name in _NEEDED}
    weight, bias, rotate = arrays["weight"], arrays["bias"], arrays["rotate_layer"]
    if weight.ndim != 2 or rotate.shape != weight.shape[::-1] or bias.shape != weight.shape[:1]:
        raise ValueError(
            f"its file {file.name} has shapes weight {list(weight.shape)}, bias {list(bias.shape)} "
            f"and rotate_layer {list(rotate.shape)}; they are [rank, hidden], [rank] and "
            "[hidden, rank]"
        )
    yield from (("rotation", rotate.T.copy()), ("weight", weight), ("bias", bias))
