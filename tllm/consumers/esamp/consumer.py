"""ESamp as a consumer: what it reads, and when it predicts, guides and trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tllm.consumers.base import Consumer
from tllm.consumers.esamp.config import ESampConsumerConfig, RequestOptions, is_group
from tllm.consumers.esamp.worker import ESampWorker
from tllm.inference_mode import in_inference_mode
from tllm.ports import (
    Candidates,
    ConsumerContext,
    ConsumerFlow,
    PortBundle,
    PortRead,
    RequestInfo,
    RequestResult,
    ResidualStream,
    Sampler,
)

logger = logging.getLogger(__name__)

_KEPT = ", and persist=True keeps those of groups until they are forgotten (forget_group)"


class ESampConsumer(Consumer):
    """Guides sampling away from what a small distiller, learning meanwhile, can predict.

    "Large Language Models Explore by Latent Distilling", arXiv 2604.24927.
    """

    consumer_id = "esamp"
    remote_methods = ("forget_group",)

    def __init__(self, config: ESampConsumerConfig | None = None) -> None:
        if not isinstance(config, ESampConsumerConfig | None):
            raise TypeError(f"config={config!r:.80}; give ESampConsumerConfig(...), or nothing")
        self.config = config or ESampConsumerConfig()
        self._worker: ESampWorker | None = None
        self._warned = False  # that a request was not guided
        self.uses_lm_head = self.config.guide
        self._predicts = 0 if self.config.guide else -1  # the flow

    def flows(self) -> Sequence[ConsumerFlow]:
        """Predict before tokens are sampled; train when the step is over."""
        flows = []
        if self.config.guide:
            flows.append(
                ConsumerFlow(
                    reads=[self._read_source()],
                    writes=[Sampler.write(phase="decode", width=self.config.width)],
                    window="same_step",
                    delivery="device_lease",
                )
            )
        if self.config.train:
            steps = self.config.train_every_n_steps
            target = ResidualStream.read(
                layer=self.config.target_layer,
                site=self.config.target_site,
                phase="decode",
                role="target",
            )
            flows.append(
                ConsumerFlow(
                    reads=[self._read_source(), target],
                    window="out_of_band",
                    bundle_key=("phase",),
                    dispatch_every_n_steps=steps,
                    delivery="device_lease" if steps == 1 else "bundle",
                )
            )
        return flows

    def _read_source(self) -> PortRead:
        return ResidualStream.read(
            layer=self.config.source_layer,
            site=self.config.source_site,
            phase="decode",
            role="source",
        )

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """`beta`, `group`, `train` and `enabled`; see `RequestOptions`."""
        RequestOptions.parse(options)

    # Buffers made in inference mode can only be written in it, whatever the engine does.
    @in_inference_mode
    def start(self, ctx: ConsumerContext) -> None:
        """Allocate the bank, unless this is a pipeline rank without the LM head. Raises
        `ValueError` where what distillers predict cannot be brought to the LM head."""
        model, config = ctx.model, self.config
        if config.guide and not (model.one_stream or config.targets_lm_head):
            raise ValueError(
                f"target_site={config.target_site!r} cannot guide this model: it carries several "
                "residual streams, and its final norm reads all of them; give "
                "target_site='lm_head_in' or guide=False"
            )
        if model.final_norm is not None or not config.needs_final_norm:
            self._worker = ESampWorker(config, ctx)
        elif model.stage == model.num_stages - 1:
            raise ValueError(
                "ESamp needs the final norm of the model, and that of this one is not known; give "
                "guide=False and a target_site other than lm_head_in"
            )

    @in_inference_mode
    def on_weights_changed(self, ctx: ConsumerContext) -> None:
        """Distillers go on learning, through the new norm."""
        if self._worker is not None:
            self._worker.renew_norm(ctx.model)

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        """Reserve a distiller."""
        if self._worker is not None:
            self._worker.join(request)

    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Predict with the rows of the first flow, if it guides; train with the others."""
        if self._worker is None:
            raise RuntimeError(
                "ESamp works where the LM head is, but its rows arrived on another pipeline "
                "rank; choose a source_layer of the last rank"
            )
        if bundle.flow == self._predicts:
            self._worker.predict(bundle, ctx)
        else:
            self._worker.train(bundle)

    @in_inference_mode
    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> None:
        """Adds `beta * (l - d)`, d being the logits of the predictions made in this step."""
        if self._worker is not None:
            self._worker.guide(candidates, ctx)

    def on_request_finished(
        self, request: RequestInfo, ctx: ConsumerContext
    ) -> RequestResult | None:
        """Give the distiller back, when nobody else needs it; say so if there was none."""
        if self._worker is None or self._worker.leave(request):
            return None
        kept = _KEPT if self.config.persist else ""
        why = (
            f"was not guided: no distiller was free (slots={self.config.slots}, "
            f"on_full={self.config.on_full!r}, or no device memory to add more){kept}; raise "
            "slots, or run fewer prompts at once"
        )
        if not self._warned:
            self._warned = True
            logger.warning(
                "ESamp: request %r %s. Further ones are counted as distillers_refused of "
                "read_stats().",
                request.request_id,
                why,
            )
        return RequestResult(None, "error", why)

    def forget_group(self, name: str) -> bool:
        """Forget what a group has learned, and let others have its slot: at once, or when the last
        of its sequences that run has ended.

        Returns:
            Whether this worker had such a group.
        """
        if not self._in_worker:
            raise RuntimeError(
                f"consumer {self.consumer_id!r}: forget_group() is of its copies in the workers; "
                f"use llm.call_consumer({self.consumer_id!r}, 'forget_group', NAME), once it is "
                "registered"
            )
        return self._worker is not None and self._worker.forget_group(name)

    def validate_call(self, method: str, args: Sequence[Any]) -> None:
        """Refuse what is no name of a group."""
        if method == "forget_group" and args and not is_group(args[0]):
            raise ValueError(
                f"forget_group was given {args[0]!r:.80}; give the name of one group, as requests "
                "name it: a non-empty string"
            )

    def synchronize(self) -> None:
        """Wait for predictions and training enqueued so far."""
        if self._worker is not None:
            self._worker.synchronize()

    @in_inference_mode
    def read_stats(self) -> Mapping[str, Any]:
        """See `doc/reference/esamp-usage.md` for what each figure counts."""
        return self._worker.read_stats() if self._worker is not None else {}

    def merge_stats(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Those of the worker that did most: tensor parallel ranks all do the same work."""

        def work(worker: Mapping[str, Any]) -> int:
            return int(worker.get("predictions", 0) + worker.get("rows_trained", 0))

        return max(stats, key=work, default={})


def from_options(**options: Any) -> ESampConsumer:
    """The consumer of a spec string such as `esamp:beta=0.3,rank=32`."""
    allowed = [field.name for field in fields(ESampConsumerConfig)]
    if unknown := sorted(set(options) - set(allowed)):
        raise ValueError(
            f"consumer 'esamp' has no options {unknown}; it takes {', '.join(allowed)}"
        )
    return ESampConsumer(ESampConsumerConfig(**options))
