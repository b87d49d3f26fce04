"""LoReFT interventions, as `pyreft` saves them: `ReftModel.save(folder)`.

A folder with `config.json` and one `intkey_*.bin` for each place, in which `torch.save` put
`weight` `[rank, hidden]`, `bias` `[rank]` and `rotate_layer` `[hidden, rank]`. Layer and component
are in the file's name: `layer.15.repr.block_output.unit.pos.nunit.1#0`, and with newer versions
`layer_15_comp_block_output_unit_pos_nunit_1#0` or
`comp_model_layers[15]_output_unit_pos_nunit_1#0` (pyvene's `IntervenableModel.save`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tllm.spec.hooks import HookPoint
from tllm.steering.formats.contents import json_mapping

_NAME = re.compile(
    r"intkey_(?:layer[._](?P<layer>\d+)[._])?(?:repr|comp)[._](?P<component>.+)"
    r"[._]unit[._](?P<unit>\w+?)"
    r"[._]nunit[._]\d+#\d+\.bin"
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
            own.

    Raises:
        ValueError: another kind of intervention than LoReFT, a component or a file that is not
            understood; the sentence says what was found and what is read.
    """
    path = Path(folder)
    try:
        return _read(path, strength, {} if positions is None else {"positions": positions})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def is_folder(path: Path) -> bool:
    """Whether `pyreft` wrote it, as far as the names of its files say."""
    return (path / "config.json").is_file() and any(path.glob("intkey_*.bin"))


def _read(
    folder: Path, strength: float, more: Mapping[str, Any]
) -> dict[str, dict[int, list[dict[str, Any]]]]:
    if not is_folder(folder):
        raise ValueError(
            "it is no folder of pyreft, which has config.json and intkey_*.bin (ReftModel.save)"
        )
    config = json_mapping((folder / "config.json").read_bytes(), "its config.json")
    for kind in config.get("intervention_types") or ():
        if "Loreft" not in str(kind):
            raise ValueError(
                f"it has an intervention of {kind}; those of LoreftIntervention are read"
            )
    spec: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for file in sorted(folder.glob("intkey_*.bin")):
        point, layer = _place(file.name)
        entry = {"method": "low_rank", **dict(_arrays(file)), "strength": strength, **more}
        spec.setdefault(str(point), {}).setdefault(layer, []).append(entry)
    return spec


def _place(name: str) -> tuple[HookPoint, int]:
    found = _NAME.fullmatch(name)
    if found is None or found["unit"] != "pos":
        raise ValueError(
            f"its file {name} is none of intkey_layer.N.repr.COMPONENT.unit.pos.nunit.K#I.bin, or "
            "intkey_layer_N_comp_COMPONENT_unit_pos_nunit_K#I.bin"
        )
    layer, component = found["layer"], found["component"]
    if block := _BLOCK.fullmatch(component):
        return HookPoint.POST_BLOCK, int(block[1])
    if component not in _COMPONENTS or layer is None:
        raise ValueError(
            f"its file {name} is for the component {component!r}; those that are read are "
            f"{', '.join(_COMPONENTS)} and model.layers[N].output"
        )
    return _COMPONENTS[component], int(layer)


def _arrays(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        saved: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # on a damaged file the restricted unpickler fails in any way
        raise ValueError(
            f"its file {file.name} cannot be read as tensors alone, and anything else could run "
            f"code: {str(error).splitlines()[0]:.80}"
        ) from None
    if not isinstance(saved, Mapping) or set(saved) != _NEEDED:
        names = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"its file {file.name} holds {names}; LoReFT's hold {sorted(_NEEDED)}")
    arrays = {name: saved[name].detach().float().numpy() for name in _NEEDED}
    weight, bias, rotate = arrays["weight"], arrays["bias"], arrays["rotate_layer"]
    if weight.ndim != 2 or rotate.shape != weight.shape[::-1] or bias.shape != weight.shape[:1]:
        raise ValueError(
            f"its file {file.name} has shapes weight {list(weight.shape)}, bias {list(bias.shape)} "
            f"and rotate_layer {list(rotate.shape)}; they are [rank, hidden], [rank] and "
            "[hidden, rank]"
        )
    yield from (("rotation", rotate.T.copy()), ("weight", weight), ("bias", bias))
