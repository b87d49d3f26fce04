"""Find the direction of a mood, then watch it in every token: the probe consumer.

    python examples/mood_probe.py

The probe is the difference of the mean states of happy and sad openings, which come in pairs that
differ in the mood word only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.text import mood_pair
from tllm import LLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.consumers.probe import ProbeConsumer
from tllm.ports import ConsumerContext, ConsumerFlow, PortBundle, RequestInfo, ResidualStream

LAYER = 3


class LastPromptState(Consumer):
    """Gives back the residual stream at the last token of the prompt."""

    consumer_id = "last_prompt_state"

    def flows(self) -> Sequence[ConsumerFlow]:
        """Prompt rows of one layer."""
        read = ResidualStream.read(layer=LAYER, phase="prefill")
        return [ConsumerFlow(reads=[read], window="background")]

    def start(self, ctx: ConsumerContext) -> None:
        """No state yet."""
        self.states: dict[int, torch.Tensor] = {}

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Keep the rows at the end of a prompt."""
        hidden = bundle.entries["hidden"].float().cpu()
        for i, request in enumerate(bundle.meta.requests):
            last = bundle.meta.request_index == i
            last &= bundle.meta.positions == request.prompt_len - 1
            if last.any():
                self.states[request.slot] = hidden[torch.from_numpy(last)][0]

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        """The state, as the request's result."""
        return self.states.pop(request.slot, None)


def main() -> None:
    """Make the probe, and score two stories with it."""
    llm = LLM(
        str(Path(__file__).parents[1] / "demo" / "model"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )

    rng = Random(0)
    pairs = [mood_pair(rng) for _ in range(100)]
    llm.register_consumer(LastPromptState())
    openings = [opening for pair in pairs for opening in pair]
    outputs = llm.generate(openings, SamplingParams(max_tokens=1), use_tqdm=False)
    states = torch.stack([o.consumer_results["last_prompt_state"].payload for o in outputs])
    happy, sad = states[0::2].mean(0), states[1::2].mean(0)
    llm.unregister_consumer("last_prompt_state")

    direction = happy - sad
    middle = (happy + sad) / 2
    llm.register_consumer(ProbeConsumer(direction, float(-direction @ middle), layer=LAYER))
    told = llm.generate(mood_pair(rng), SamplingParams(max_tokens=40, seed=1), use_tqdm=False)
    for output in told:
        scores = output.consumer_results["probe"].payload.values
        print(f"{scores.mean():+8.2f}  {output.prompt}{output.outputs[0].text}")


if __name__ == "__main__":
    main()
