"""Steering vectors from files that people already have."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tllm.spec.hooks import HookPoint
from tllm.spec.layers import Layers
from tllm.spec.reading import hook_named, json_mapping, said_of, scalar
from tllm.steering.formats import gguf, reft, sae, svec
from tllm.steering.formats.arrays import (
    NUMPY_MAGIC,
    read_numpy,
    read_safetensors,
    read_torch,
)
from tllm.steering.formats.contents import Contents, Placed
from tllm.steering.formats.names import NamedPlace
from tllm.steering.formats.sae import Features
from tllm.steering.module import SteeringModule, VectorEntry, Vectors

Reader = Callable[[Path], "Contents | SteeringModule"]

KNOWN = (
    "GGUF control vectors, safetensors, .pt files of tensors, .npy and .npz, .svec of "
    "activation-steering, and folders with a sparse autoencoder in SAELens' layout"
)

_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors reads no longer one."""


@runtime_checkable
class ControlVector(Protocol):
    """What repeng makes: directions by block, each `[hidden]`."""

    model_type: str
    directions: Mapping[int, Any]


def load(
    path: str | PathLike[str] | ControlVector,
    *,
    hook: str | HookPoint | None = None,
    layers: Any = None,
    scale: float = 1.0,
    normalize: bool = False,
    features: Features | None = None,
) -> SteeringModule:
    """Read steering vectors.

    What a file is, its first bytes say, not its name:

    - a GGUF control vector of llama.cpp or repeng (`tllm.steering.formats.gguf`);
    - safetensors, `.npz` or `torch.save` with arrays `[hidden]` by layer, under the keys that
      `tllm.steering.formats.names` lists; or one array `[hidden]` or `[layers, hidden]`;
    - a `.npy` file with such an array;
    - a `.svec` file of IBM's `activation-steering` (`tllm.steering.formats.svec`);
    - a folder with a sparse autoencoder of SAELens (`tllm.steering.formats.sae`);
    - what `SteeringModule.save` wrote, which comes back as it was.

    No pickled object is restored, so a file cannot run code.

    Args:
        path: the file or folder, or a `ControlVector` of repeng.
        hook: the hook point of vectors for which the file names none; `post_block` if not given.
            From a file that does name hook points, only the vectors for this one.
        layers: as `tllm.spec.layers.Layers` reads them, counted from 0. From a file that numbers
            its vectors, only those of these layers. For an array `[hidden]`, the layers it goes to;
            for `[layers, hidden]`, the layer of each row, as many as there are rows (row i is layer
            i if not given, when there are two or more; it can be used with models of as many layers
            then).
        scale: multiplies the scale of every vector.
        normalize: give every vector unit length; of a sparse autoencoder, every row.
        features: of a sparse autoencoder, which decoder rows: one, several, or
            `{feature: weight}`; their weighted sum is the vector.

    Returns:
        A module; its vectors are float32 `[hidden]`.

    Raises:
        FileNotFoundError: nothing is there.
        ImportError: a GGUF file, and `gguf` is not installed.
        ValueError: anything that cannot be read without a guess; the sentence says what was
            found, what is allowed and how to fix it.
    """
    source = f"repeng {path.model_type}" if isinstance(path, ControlVector) else str(path)
    with said_of(source):  # the readers speak of "it"
        wanted = None if layers is None else _wanted(layers)
        point = None if hook is None else hook_named(hook, "hook")
        read = _read(path, point, wanted, normalize, features)
        vectors = {} if isinstance(read, SteeringModule) else _arranged(read, point, wanted)
    if isinstance(read, SteeringModule):
        module = read
    else:
        module = SteeringModule(vectors, source, read.metadata, _counted(read.stack, wanted))
    if isinstance(read, SteeringModule) or read.stack is None:
        module = module.select(wanted, point)
    if normalize and features is None:
        module = _normalized(module)
    return module.scaled(scalar(scale, "scale"))


def module_in(path: str | PathLike[str]) -> Any:
    """What the file of a module says: in JSON what `llm.steering.register_module` takes, in any
    other the vectors that `load` reads."""
    if Path(path).suffix != ".json":
        return load(path)
    return json_mapping(Path(path).read_bytes(), "it")


def _read(
    path: str | PathLike[str] | ControlVector,
    hook: HookPoint | None,
    layers: list[int] | None,
    normalize: bool,
    features: Features | None,
) -> Contents | SteeringModule:
    if isinstance(path, ControlVector):
        if features is not None:
            raise ValueError("features= is for sparse autoencoders, and this is a ControlVector")
        placed = (
            Placed(NamedPlace(HookPoint.POST_BLOCK, n), v) for n, v in path.directions.items()
        )
        return Contents(tuple(placed), metadata={"model_hint": path.model_type})
    file = Path(path)
    if file.is_dir():
        if reft.is_folder(file):
            raise ValueError("it is a folder of pyreft; read it with tllm.steering.load_reft")
        place = NamedPlace(hook, layers[0]) if hook and layers and len(layers) == 1 else None
        return sae.read(file, features, normalize, place)
    if features is not None:
        raise ValueError(
            f"features= is for sparse autoencoders, and this is a file; give the folder that has "
            f"{sae.CONFIG} and {sae.WEIGHTS}"
        )
    return _reader(file)(file)


def _reader(path: Path) -> Reader:
    """The reader of a file, chosen by what is in it."""
    with path.open("rb") as file:
        start = file.read(9)
    if not start:
        raise ValueError("it is empty")
    if start.startswith(gguf.MAGIC):
        return gguf.read
    if start.startswith(NUMPY_MAGIC):
        return read_numpy
    if start.startswith(b"PK\x03\x04"):
        names = _names_in_zip(path)
        if not names:
            raise ValueError(
                "it is damaged, or was cut off: it starts as a zip file, which .pt and .npz are, "
                "and the list of what that holds, at its end, is not there"
            )
        if any(name.endswith("/data.pkl") for name in names):
            return read_torch
        if all(name.endswith(".npy") for name in names):
            return read_numpy
    # safetensors: the length of the header in 8 bytes, then the header, which is a JSON object.
    length, size = int.from_bytes(start[:8], "little"), path.stat().st_size
    if start[8:] == b"{" and length < size:
        return read_safetensors
    if start[8:] == b"{" and length <= _LONGEST_HEADER:
        raise ValueError(
            f"it is damaged, or was cut off: it starts as a safetensors file, whose header alone "
            f"has {length} bytes, and it has {size} in all"
        )
    if start.startswith(b"{"):
        return svec.read
    # A pickle of protocol 2 or later, which torch.save wrote before it wrote zip files.
    if start[0] == 0x80:
        return read_torch
    raise ValueError(f"it starts with {start!r}, which is no format that is read: {KNOWN}")


def _names_in_zip(path: Path) -> list[str]:
    """Of what a zip file holds; none where it is no zip file after all."""
    try:
        if not zipfile.is_zipfile(path):
            return []
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"it is a damaged zip file: {error}") from None


def _arranged(read: Contents, hook: HookPoint | None, layers: list[int] | None) -> Vectors:
    vectors: Vectors = {}
    default = hook or HookPoint.POST_BLOCK
    placed = read.placed if read.stack is None else _from_stack(read.stack, default, layers)
    for each in placed:
        entries = vectors.setdefault(str(each.place.hook or default), {})
        if each.place.layer in entries:
            raise ValueError(
                f"it has two vectors for {each.place.hook or default} of layer "
                f"{each.place.layer}; keep one, or add them"
            )
        scale = 1.0 if each.scale is None else each.scale
        entry: VectorEntry = {"vector": each.vector, "scale": scale}
        entries[each.place.layer] = entry
    return vectors


def _counted(stack: Any, layers: list[int] | None) -> int | None:
    """How many rows say no layer, and are one for each."""
    return None if stack is None or layers is not None else len(_squeezed(stack))


def _squeezed(stack: Any) -> npt.NDArray[Any]:
    """An array without dimensions of length 1 before `[layers, hidden]`."""
    array = np.asarray(stack)
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    return array


def _from_stack(stack: Any, hook: HookPoint, layers: list[int] | None) -> Iterable[Placed]:
    array = _squeezed(stack)
    if array.ndim == 1:
        array = array[None]
        rows = 1
    elif array.ndim == 2:
        rows = len(array)
    else:
        raise ValueError(
            f"it has an array of shape {list(array.shape)}; it may be [hidden] or [layers, hidden]"
        )
    if rows == 1:
        if layers is None:
            raise ValueError(
                f"it has one vector [{array.shape[1]}] and says no layer; say where it goes, such "
                "as layers=12 or layers=[10, 11, 12]"
            )
        return [Placed(NamedPlace(hook, layer), array[0]) for layer in layers]
    if layers is None:
        layers = list(range(rows))
    if len(layers) != rows:
        raise ValueError(
            f"it has {rows} vectors that say no layer, and layers= has {len(layers)} entries; give "
            f"{rows}, the layer of each row, and use .select(layers) on the result to drop some"
        )
    return [Placed(NamedPlace(hook, layer), row) for layer, row in zip(layers, array, strict=True)]


def _wanted(layers: Any) -> list[int] | None:
    """The layers that were chosen; None for all that the file has."""
    chosen = Layers.parse(layers)
    if chosen.is_all:
        return None
    return list(chosen.from_start("layers", "a file does not say how many the model has"))


def _normalized(module: SteeringModule) -> SteeringModule:
    vectors: Vectors = {}
    for point, layers in module.vectors.items():
        vectors[point] = {}
        for layer, entry in layers.items():
            length = float(np.linalg.norm(entry["vector"].astype(np.float64)))
            if length == 0.0:
                raise ValueError(
                    f"{module.source}: {point} of layer {layer} is zero and cannot be normalised"
                )
            unit = entry["vector"].astype(np.float64) / length
            vectors[point][layer] = {"vector": unit.astype(np.float32), "scale": entry["scale"]}
    return replace(module, vectors=vectors)
