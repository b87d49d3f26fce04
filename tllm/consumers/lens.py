"""Lenses: what a model would say if it stopped at a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from tllm.consumers.readout import ReadoutConsumer, ReadoutWindow
from tllm.consumers.token_rows import Arrays
from tllm.consumers.translators import SITES, Translator, TranslatorFile
from tllm.ports import ConsumerContext, PerToken, Place
from tllm.spec.hooks import HEAD_POINTS, HookPoint
from tllm.spec.layers import Layers
from tllm.spec.reading import hook_named, whole_number

RowMap: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_CHUNK_BYTES = 64 * 2**20
"""Logits that are there at once: vLLM's memory profile knows nothing of us."""


class LensConsumer(ReadoutConsumer):
    """The best next tokens that the rows of each layer give, through the model's own final norm and
    LM head: logit lens; with fitted maps before the norm, tuned lens or Jacobian lens.

    A request asks with `SamplingParams(consumers={"lens": options})`; `layers`, `positions` and
    `top_k` may be chosen among those of the consumer. It is given a mapping: `layers`, a list, and
    `token_ids` and `logprobs`, each a `PerToken` with values `[rows, layers, top_k]`, best first.

    Args:
        layers: as `tllm.spec.layers.Layers` reads them; `"all"` are all that `path` has.
        path: of a fitted lens: a folder of `tuned-lens`, or a file of `jacobian-lens`. None: the
            logit lens.
        site: hook point whose rows are read, `post_block` unless told. A fitted lens has its own.
        top_k: tokens for each layer and position.
        positions: see `ReadoutConsumer`.
        window: see `ReadoutConsumer`. None: `out_of_band`, but `same_step` on GPUs with tensor
            parallelism, where it has to be.
        consumer_id: its name, for a second one in the same engine.
    """

    known_options = ("layers", "top_k")
    lasting_options = ("layers",)
    uses_lm_head = True
    ranks = "all"  # which may hold parts of the LM head

    def __init__(
        self,
        layers: Any = "all",
        *,
        path: str | Path | None = None,
        site: str | None = None,
        top_k: int = 5,
        positions: Any = "all",
        window: ReadoutWindow | None = None,
        consumer_id: str = "lens",
    ) -> None:
        super().__init__(positions=positions, window="out_of_band" if window is None else window)
        self._given_window = window
        self.consumer_id = consumer_id
        self._top_k = whole_number(top_k, "top_k=", 1)
        self._layers = Layers.parse(layers)
        self._path = None if path is None else Path(path).resolve()
        self._fitted: tuple[int, ...] | None = None
        own = "post_block"
        if self._path is not None:
            file = TranslatorFile(self._path)
            self._fitted, own = tuple(file.layers), SITES[file.kind]
        self._site = hook_named(own if site is None else site, "site")
        if self._path is not None and self._site.value != own:
            raise ValueError(
                f"site={site!r}, but the lens in path={str(path)!r} was fitted on {own}; leave "
                "site out"
            )
        if not self._site.has_layer:
            raise ValueError(f"site={site!r} belongs to no layer; choose a point that does")
        if self._site in (*HEAD_POINTS, HookPoint.ROUTER):
            raise ValueError(
                f"site={site!r} has rows that the LM head cannot read; choose a point of the "
                "residual stream, or of what enters or leaves attention or the MLP"
            )

    def _chosen(self, options: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
        """The layers of a request, in its order."""
        offered = self._layers.of(num_layers, self._site, "layers")
        if self._fitted is not None:
            if self._layers.is_all:
                offered = self._fitted
            if missing := sorted(set(offered) - set(self._fitted)):
                raise ValueError(
                    f"layers={str(self._layers)!r}: the lens in path={str(self._path)!r} has no "
                    f"layer {missing[0]}; it has {', '.join(map(str, self._fitted))}"
                )
        name = f"consumers[{self.consumer_id!r}]['layers']"
        asked = Layers.parse(options.get("layers", "all"), name)
        if asked.is_all:
            return offered
        chosen = asked.of(num_layers, self._site, name)
        if missing := sorted(set(chosen) - set(offered)):
            raise ValueError(
                f"{name} has {missing[0]}, and the consumer was registered with layers "
                f"{', '.join(map(str, offered))}; choose of these"
            )
        return chosen

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """Also `top_k`: no more than the consumer computes."""
        super().validate_options(options)
        if "top_k" in options:
            name = f"consumers[{self.consumer_id!r}]['top_k']"
            whole_number(options["top_k"], f"{name}=", 1, self._top_k)

    def places(self, options: Mapping[str, Any], num_layers: int) -> tuple[Place, ...]:
        """Its layers at the lens's hook point."""
        return tuple((self._site.value, layer) for layer in self._chosen(options, num_layers))

    def start(self, ctx: ConsumerContext) -> None:
        """Put the maps where the rows are. Raises `ValueError` where the model's own final norm and
        LM head cannot be used."""
        super().start(ctx)
        model = ctx.model
        self._num_layers = model.num_layers
        if model.num_stages > 1:
            raise ValueError(
                "a lens needs the rows of all layers where the LM head is, and this engine has "
                f"{model.num_stages} pipeline stages; start it with pipeline_parallel_size=1"
            )
        if not model.one_stream:
            raise ValueError(
                "a lens is not possible with this model: it carries several residual streams, and "
                "its final norm reads all of them; capture the rows and read them as you see fit"
            )
        if model.final_norm is None or model.lm_head is None:
            why = "the final norm is not known" if model.lm_head else model.lm_head_refusal
            raise ValueError(f"a lens is not possible with this model: {why}")
        self._window = self._window_of(model.lm_head_is_shared and ctx.device.type == "cuda")
        whole_number(self._top_k, "top_k=", 1, model.vocab_size)
        self._dtype = model.dtype
        self._use(model.final_norm, model.lm_head)
        self._chunk = max(1, _CHUNK_BYTES // (4 * model.vocab_size))
        self._translators = self._load(self._chosen({}, model.num_layers), ctx)

    def on_weights_changed(self, ctx: ConsumerContext) -> None:
        """Through the new norm and LM head; a fitted lens stays as it is."""
        if ctx.model.final_norm is None or ctx.model.lm_head is None:
            raise RuntimeError(f"the new weights have no lens: {ctx.model.lm_head_refusal}")
        self._use(ctx.model.final_norm, ctx.model.lm_head)

    def _window_of(self, together: bool) -> ReadoutWindow:
        """The window; `same_step` where ranks compute logits together, on their GPUs."""
        if not together:
            return self._given_window or "out_of_band"
        if self._given_window not in (None, "same_step"):
            raise ValueError(
                f"window={self._given_window!r}: the LM head is shared by tensor-parallel ranks, "
                "which compute its logits together; leave window out, or give window='same_step'"
            )
        return "same_step"

    def _use(self, final_norm: RowMap, lm_head: RowMap) -> None:
        self._final_norm, self._lm_head = final_norm, lm_head

    def _load(self, layers: Sequence[int], ctx: ConsumerContext) -> dict[int, Translator]:
        if self._path is None:
            return {}
        file = TranslatorFile(self._path)
        if file.hidden_size != ctx.model.hidden_size:
            raise ValueError(
                f"the lens in path={str(self._path)!r} is for hidden size {file.hidden_size}, and "
                f"the model's is {ctx.model.hidden_size}; give one that was fitted on this model"
            )
        found = {layer: file.layers[layer].to(ctx.device) for layer in layers}
        for layer, translator in found.items():
            if not translator.is_finite:
                raise ValueError(
                    f"layer {layer} of the lens in path={str(self._path)!r} has numbers that are "
                    "NaN or infinite in float32; give a file that was saved whole"
                )
        return found

    def read_out(self, rows: torch.Tensor, places: tuple[Place, ...]) -> Mapping[str, torch.Tensor]:
        """The best tokens of each layer, and their log-probabilities."""
        states = rows
        if self._translators:
            translated = [
                self._translators[layer](rows[:, i].float())
                for i, (_, layer) in enumerate(places)
                if layer is not None
            ]
            states = torch.stack(translated, 1).to(self._dtype)
        ids, logprobs = [], []
        for part in states.reshape(-1, rows.shape[-1]).split(self._chunk):
            logits = self._lm_head(self._final_norm(part.contiguous()))
            best, tokens = logits.topk(self._top_k)
            ids.append(tokens.to(torch.int32))
            logprobs.append(best - logits.logsumexp(-1, keepdim=True))
        shape = len(rows), len(places), self._top_k
        return {
            "token_ids": torch.cat(ids).reshape(shape),
            "logprobs": torch.cat(logprobs).reshape(shape),
        }

    def nothing(self, options: Mapping[str, Any]) -> Arrays:
        """No tokens of its layers."""
        shape = 0, len(self._chosen(options, self._num_layers)), self._top_k
        return {"token_ids": np.zeros(shape, np.int32), "logprobs": np.zeros(shape, np.float32)}

    def given(self, options: Mapping[str, Any], found: Mapping[str, PerToken]) -> Any:
        """As many of them as the request asked for."""
        count = options.get("top_k", self._top_k)
        best = {
            name: PerToken(each.positions, each.values[..., :count]) for name, each in found.items()
        }
        return {"layers": list(self._chosen(options, self._num_layers)), **best}
