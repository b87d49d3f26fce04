"""Sparse autoencoders: which features are active in each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tllm.consumers.readout import ReadoutConsumer, ReadoutWindow
from tllm.consumers.sparse_autoencoder import SparseAutoencoder
from tllm.consumers.token_rows import Arrays
from tllm.ports import ConsumerContext, PerToken, Place
from tllm.spec.hooks import HookPoint, counted_layer
from tllm.spec.layers import layer_numbered
from tllm.spec.probes import FeatureProbe
from tllm.spec.reading import hook_named, whole_number, whole_numbers

_CHUNK_BYTES = 64 * 2**20
"""Activations that are there at once: vLLM's memory profile knows nothing of us."""

_TOP_K = 10
NO_FEATURE = -1
"""In the place of a feature where fewer are active than there is room for."""


class SaeConsumer(ReadoutConsumer):
    """The active features of a sparse autoencoder in each token, or those of some chosen features.

    A request asks with `SamplingParams(consumers={"sae": options})`; `positions` and `top_k` may be
    chosen. It is given a mapping:

    - of the most active ones: `features` and `values`, each a `PerToken` with values
      `[rows, top_k]`, the most active first and `NO_FEATURE` with 0 where no more are active; and
      `active`, a `PerToken` with the number of active features. A feature whose activation is NaN,
      as of a row that is not finite, counts as active.
    - of chosen ones: `features`, the list, and `values`, a `PerToken` with `[rows, features]`.

    Args:
        path: a folder as SAELens saves it, with `cfg.json` and `sae_weights.safetensors`.
        layer, site: where it reads, unless where it was trained. `ValueError` for a hook of
            training that we do not have, unless both are given.
        top_k: features for each token, 10 unless told.
        features: these ones, instead of the most active. `top_k` is left out then.
        positions, window: see `ReadoutConsumer`.
        consumer_id: its name, for a second one in the same engine.
    """

    known_options = ("top_k",)

    def __init__(
        self,
        path: str | Path,
        *,
        layer: int | None = None,
        site: str | None = None,
        top_k: int | None = None,
        features: int | Sequence[int] | None = None,
        positions: Any = "all",
        window: ReadoutWindow = "out_of_band",
        consumer_id: str = "sae",
    ) -> None:
        super().__init__(positions=positions, window=window)
        self.consumer_id = consumer_id
        self._path = Path(path).resolve()
        config = SparseAutoencoder.read_config(self._path)
        own = config.place
        if own is None and (layer is None or site is None):
            raise ValueError(
                f"path={str(path)!r} was trained on {config.hook_name!r}, which is no hook point "
                "here; give the layer= and site= that it is to read"
            )
        if layer is not None:
            layer = layer_numbered(layer, "layer")
        trained_site, trained_layer = own or (site, layer)
        point = hook_named(site or trained_site or "", "site")
        self._place = point.value, trained_layer if layer is None else layer
        self._features = _listed(features, config.d_sae)
        if self._features is not None and top_k is not None:
            raise ValueError(
                f"top_k={top_k!r} was given with features={list(self._features)}, which are all "
                "given; leave one of them out"
            )
        self._top_k = whole_number(_TOP_K if top_k is None else top_k, "top_k=", 1)
        if self._features is None:
            self._top_k = min(self._top_k, config.d_sae)

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """Also `top_k`: no more than the consumer computes."""
        super().validate_options(options)
        if "top_k" not in options:
            return
        name = f"consumers[{self.consumer_id!r}]['top_k']"
        if self._features is not None:
            raise ValueError(
                f"{name} was given, and the consumer was registered with features="
                f"{list(self._features)}, which are all given; leave it out"
            )
        whole_number(options["top_k"], f"{name}=", 1, self._top_k)

    def places(self, options: Mapping[str, Any], num_layers: int) -> tuple[Place, ...]:
        """The one that it reads."""
        site, layer = self._place
        has_layer = HookPoint(site).has_layer
        return ((site, counted_layer(layer, num_layers, site) if has_layer else None),)

    def probe_of(self, feature: int, *, centers_rows: bool) -> FeatureProbe:
        """A feature as a probe, for conditions: any, also where only some are given to requests.

        Args:
            centers_rows: whether the model's norms take the mean off rows.

        Raises `ValueError` for a feature that there is not, or that is no function of its own
        weights.
        """
        name = f"consumer {self.consumer_id!r}"
        config = SparseAutoencoder.read_config(self._path)
        if config.architecture == "topk":
            raise ValueError(
                f"{name} is a topk autoencoder, in which a feature's activation depends on all "
                "others; give a standard, jumprelu or gated one, or the row of its encoder as "
                "'vector'"
            )
        if not 0 <= feature < config.d_sae:
            raise ValueError(
                f"{name} has features 0 to {config.d_sae - 1}, and feature={feature} was given"
            )
        found = SparseAutoencoder.load(self._path, feature)
        site, layer = self._place
        point = HookPoint(site)
        centered = config.centered and centers_rows
        return found.probe(point, layer if point.has_layer else None, centered=centered)

    def start(self, ctx: ConsumerContext) -> None:
        """Put the encoder where the rows are."""
        super().start(ctx)
        self.places({}, ctx.model.num_layers)
        found = SparseAutoencoder.load(self._path)
        config = found.config
        if config.d_in != ctx.model.hidden_size:
            raise ValueError(
                f"path={str(self._path)!r} is for rows of {config.d_in} numbers, and the model's "
                f"hidden size is {ctx.model.hidden_size}; give one that was trained on this model"
            )
        if self._features is not None and config.architecture != "topk":
            found = found.only(self._features)
        self._chunk = max(1, _CHUNK_BYTES // (4 * found.config.d_sae))
        self._autoencoder = found.to(ctx.device)
        # TransformerLens leaves models with RMS norms as they are.
        self._centered = config.centered and ctx.model.final_norm_weight is None
        self._columns = None
        if self._features is not None and config.architecture == "topk":
            self._columns = torch.tensor(self._features, device=ctx.device)

    def read_out(self, rows: torch.Tensor, places: tuple[Place, ...]) -> Mapping[str, torch.Tensor]:
        """What is active, and how much."""
        parts = [self._read_part(part) for part in rows[:, 0].split(self._chunk)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _read_part(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._centered:
            rows = rows.float() - rows.float().mean(-1, keepdim=True)
        activations = self._autoencoder.encode(rows).float()
        if self._features is not None:
            chosen = activations if self._columns is None else activations[:, self._columns]
            return {"values": chosen}
        values, features = activations.topk(self._top_k)
        active = ~(values <= 0)  # NaN too: it is not known to be none
        return {
            "features": torch.where(active, features, NO_FEATURE).to(torch.int32),
            "values": torch.where(active, values, 0.0),
            "active": (~(activations <= 0)).sum(-1, dtype=torch.int32),
        }

    def nothing(self, options: Mapping[str, Any]) -> Arrays:
        """No features."""
        if self._features is not None:
            return {"values": np.zeros((0, len(self._features)), np.float32)}
        shape = 0, self._top_k
        return {
            "features": np.zeros(shape, np.int32),
            "values": np.zeros(shape, np.float32),
            "active": np.zeros(0, np.int32),
        }

    def given(self, options: Mapping[str, Any], found: Mapping[str, PerToken]) -> Any:
        """As many of them as the request asked for."""
        if self._features is not None:
            return {"features": list(self._features), **found}
        count = options.get("top_k", self._top_k)
        best = {
            name: PerToken(found[name].positions, found[name].values[:, :count])
            for name in ("features", "values")
        }
        return {**best, "active": found["active"]}


def _listed(features: Any, count: int) -> tuple[int, ...] | None:
    """Chosen features, each once."""
    if features is None:
        return None
    return tuple(dict.fromkeys(whole_numbers(features, "features", 0, count - 1)))
