"""Where does the model hesitate? A consumer of one's own, which reads the logits.

python examples/own_consumer.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tllm import LLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.ports import ConsumerContext, ConsumerFlow, Logits, PerToken, PortBundle, RequestInfo


class Entropy(Consumer):
    """The entropy, in bits, of the distribution that each token was drawn from."""

    consumer_id = "entropy"

    def flows(self) -> Sequence[ConsumerFlow]:
        """Logits, on a thread of its own."""
        return [ConsumerFlow(reads=[Logits.read()], window="background")]

    def start(self, ctx: ConsumerContext) -> None:
        """No rows yet."""
        self.rows: dict[int, list[tuple[np.int32, np.float32]]] = {}

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """One row for each sequence that drew a token."""
        logprobs = bundle.entries["logits"].float().log_softmax(-1)
        bits = -(logprobs.exp() * logprobs).sum(-1).cpu().numpy() / np.log(2)
        for slot, *row in zip(bundle.meta.slots, bundle.meta.positions, bits, strict=True):
            self.rows.setdefault(int(slot), []).append((row[0], row[1]))

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> PerToken:
        """The entropies of a sequence; one that was aborted in its prompt has none."""
        rows = self.rows.pop(request.slot, [])
        positions: npt.NDArray[np.int32] = np.array([position for position, _ in rows], np.int32)
        return PerToken(positions, np.array([bits for _, bits in rows]))


def main() -> None:
    """Print a story with the entropy before each word."""
    llm = LLM(
        str(Path(__file__).parents[1] / "demo" / "model"),
        consumers=[Entropy()],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    (output,) = llm.generate("One morning Mia walked to the market.", params, use_tqdm=False)
    sample = output.outputs[0]
    tokenizer = llm.get_tokenizer()
    bits = sample.consumer_results["entropy"].payload.values
    for token, entropy in zip(sample.token_ids, bits, strict=True):
        print(f"{entropy:5.2f} bits {'#' * round(8 * entropy):40} {tokenizer.decode([token])!r}")


if __name__ == "__main__":
    main()
