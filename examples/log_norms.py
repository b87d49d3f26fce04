"""How the residual stream grows from layer to layer: the logging consumer.

python examples/log_norms.py
"""

from __future__ import annotations

from pathlib import Path

from tllm import LLM, SamplingParams
from tllm.consumers.logging import LoggingConsumer


def main() -> None:
    """Print the mean norm of every layer's output, for prompt and generated tokens."""
    norms = LoggingConsumer(layers="0-5", every_n_steps=16, level="warning")
    llm = LLM(
        str(Path(__file__).parents[1] / "demo" / "model"),
        consumers=[norms],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    llm.chat(
        [{"role": "user", "content": "Tell me a sad story about Leo."}],
        SamplingParams(max_tokens=48, temperature=0.8, n=4),
        use_tqdm=False,
    )
    for layer, phases in norms.read_stats()["layers"].items():
        means = [f"{phase} {figures['mean_norm']:7.2f}" for phase, figures in phases.items()]
        print(f"layer {layer}:", ", ".join(means))


if __name__ == "__main__":
    main()
