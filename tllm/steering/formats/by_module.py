"""Interventions that others keep by the names of `transformers`' modules, whose output they change.

Of `ml-act` (AcT, arXiv 2410.23054): a folder with a file `NAME.statedict` for each module, such as
`model.layers.3.post_attention_layernorm:0.statedict`, in which `torch.save` put

    linear_ot                 net.w1, net.b1 `[1, hidden]`: `h' = w1 h + b1`
    gaussian_ot, mean_ot      mu1, std1, mu2, std2 `[hidden]`: from N(mu1, std1) to N(mu2, std2)
    both                      quantiles_dict_src: `{"q_5_95": [low, high], ...}` of the source

Of angular steering (arXiv 2510.26243): a dict `{NAME: {"first_direction", "second_direction"}}`.

A name says which module of which block is meant, and not which hook point that is: what leaves
`post_attention_layernorm` goes into the MLP of Llama, and is added to the stream of Gemma 2. So
whoever loads it says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import FloatArray, float_array, hook_named, require_one_of, said_of
from tllm.steering.formats.arrays import restored
from tllm.steering.formats.names import BLOCKS

Spec = dict[str, dict[int, dict[str, Any]]]

_NAME = re.compile(rf"(?:{BLOCKS})\.(?P<layer>\d+)(?:\.(?P<module>[\w.]+))?(?::0)?")
_SUFFIX = ".statedict"
_LINEAR = "net.w1", "net.b1"
_GAUSSIAN = "mu1", "std1", "mu2", "std2"
_LEAST_STD = 1e-4
"""Dimensions that vary less are left alone, as ml-act does."""


def load_act(
    folder: str | PathLike[str],
    *,
    modules: Mapping[str, str] | None = None,
    strength: float = 1.0,
    quantiles: str = "q_all",
    mean_only: bool = False,
    **more: Any,
) -> Spec:
    """What a folder of `ml-act` does, as a spec for `steering_vectors` and the like.

    Args:
        folder: has `*.statedict`, of `linear_ot`, `gaussian_ot` or `mean_ot`. They are read with
            `weights_only=True`, so that they cannot run code.
        modules: which hook point a module's output is, by its name in the block:
            `{"post_attention_layernorm": "mlp_in"}`. Blocks themselves need none.
        strength: the paper's lambda.
        quantiles: only numbers between these quantiles of the source are moved, such as
            `"q_5_95"`; all of them with `"q_all"`.
        mean_only: move the means alone, as `mean_ot` does, whose files are as those of
            `gaussian_ot`.
        **more: `positions` and `when` of the entries.

    Raises:
        ValueError: a file or a module that is not understood; the sentence says what was found and
            what is read.
    """
    path = Path(folder)
    with said_of(str(path)):
        files = sorted(path.glob(f"*{_SUFFIX}"))
        if not files:
            raise ValueError(f"it is no folder of ml-act, which has files NAME{_SUFFIX}")
        entries = {
            file.name.removesuffix(_SUFFIX): {
                "method": "affine",
                **_affine(file, quantiles, mean_only),
                "strength": strength,
                **more,
            }
            for file in files
        }
        return _placed(entries, modules)


def load_angular(
    config: Mapping[str, Mapping[str, Any]],
    *,
    degrees: float,
    adaptive: bool = True,
    modules: Mapping[str, str] | None = None,
    strength: float = 1.0,
    **more: Any,
) -> Spec:
    """What a configuration of angular steering does, as a spec for `steering_vectors` and the like.

    Args:
        config: what `numpy.load(PATH, allow_pickle=True).item()` gives. That may run any code, so
            it is yours to call, on a file that you trust.
        degrees: the angle that rows are turned to, counted from the first direction.
        adaptive: only rows with a part along the first direction, as their `adaptive_mode=1` does.
        modules: as of `load_act`; these configurations have `input_layernorm` and
            `post_attention_layernorm`.
        strength: how much of it is done.
        **more: `positions` and `when` of the entries.

    Raises:
        ValueError: an entry or a module that is not understood.
    """
    directions = "first_direction", "second_direction"
    entries = {}
    for name, found in config.items():
        if not isinstance(found, Mapping) or not all(key in found for key in directions):
            has = sorted(map(str, found)) if isinstance(found, Mapping) else f"{found!r:.60}"
            raise ValueError(f"config[{name!r}] has {has}; it has {' and '.join(directions)}")
        plane = [float_array(found[key], f"config[{name!r}][{key!r}]") for key in directions]
        entries[name] = {
            "method": "rotate",
            "plane": plane,
            "degrees": degrees,
            "adaptive": adaptive,
            "strength": strength,
            **more,
        }
    with said_of("config"):
        return _placed(entries, modules)


def _placed(entries: Mapping[str, dict[str, Any]], modules: Mapping[str, str] | None) -> Spec:
    """Entries by the names of modules, as a spec."""
    known = {name: hook_named(hook, f"modules[{name!r}]") for name, hook in (modules or {}).items()}
    spec: Spec = {}
    for name, entry in entries.items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(
                f"its name {name!r} is no module of a block, such as 'model.layers.3.mlp'; an "
                "output other than the first (':1') is not read"
            )
        module, layer = found["module"], int(found["layer"])
        if module is not None and module not in known:
            raise ValueError(
                f"it has the module {module!r}, whose output is another hook point in other "
                f"families of models; say which here: modules={{{module!r}: 'mlp_in'}}, say"
            )
        hook = str(HookPoint.POST_BLOCK if module is None else known[module])
        if layer in spec.setdefault(hook, {}):
            raise ValueError(f"it has several modules that are {hook} of layer {layer}")
        spec[hook][layer] = entry
    return spec


def _affine(file: Path, quantiles: str, mean_only: bool) -> dict[str, FloatArray]:
    """The arrays of `affine` in a file of ml-act."""
    saved = restored(file)
    names = [key for key in (*_LINEAR, *_GAUSSIAN) if isinstance(saved, Mapping) and key in saved]
    if names not in ([*_LINEAR], [*_GAUSSIAN]):
        has = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"its file {file.name} holds {has}; those of linear_ot hold {', '.join(_LINEAR)}, and "
            f"those of gaussian_ot and mean_ot {', '.join(_GAUSSIAN)}"
        )
    told = f"its file {file.name}: "
    given = {key: float_array(saved[key], f"{told}{key}").reshape(-1) for key in names}
    if names == [*_LINEAR]:
        if mean_only:
            raise ValueError(f"{told}mean_only is for gaussian_ot and mean_ot, and it is linear_ot")
        arrays = {"weight": given["net.w1"], "shift": given["net.b1"]}
    else:
        mu1, std1, mu2, std2 = (given[key].astype(np.float64) for key in _GAUSSIAN)
        varied = (std1 > _LEAST_STD) & (std2 > _LEAST_STD)
        ratio = np.divide(std2, std1, out=np.ones_like(std1), where=varied & (not mean_only))
        arrays = {"weight": ratio, "shift": np.where(varied, mu2 - ratio * mu1, 0.0)}
    if quantiles != "q_all":
        of_source = saved.get("quantiles_dict_src") or {}
        require_one_of("quantiles", quantiles, ("q_all", *of_source))
        for key, limit in zip(("low", "high"), of_source[quantiles], strict=True):
            arrays[key] = float_array(limit, f"{told}{quantiles}").reshape(-1)
    return {key: each.astype(np.float32) for key, each in arrays.items()}
