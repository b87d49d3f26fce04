"""`python serving.py MODEL ROOT OUTPUT`: captures of an `AsyncLLM`; saves what came back."""

from __future__ import annotations

import asyncio
import sys

import torch
from vllm.sampling_params import RequestOutputKind

from tllm import AsyncLLM, SamplingParams

MEMORY = {"hooks": {"post_block": [1]}}
DISK = {"hooks": {"post_block": [1]}, "tag": "t"}
PROMPTS = [[10, 11, 12], list(range(40, 60)), list(range(100, 140))]


def params(max_tokens: int, capture, **options) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, **options},
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
        capture=capture,
    )


async def last(engine, prompt, asked, request_id):
    """The last output of a request."""
    async for output in engine.generate({"prompt_token_ids": prompt}, asked, request_id):
        found = output
    return found


def saved_output(output):
    return {
        "prompt": list(output.prompt_token_ids),
        "samples": [
            {
                "tokens": list(sample.token_ids),
                "results": {
                    name: (result.status, result.error)
                    for name, result in sample.capture_results.items()
                },
                "rows": sample.activations["post_block"][1].tensor,
                "positions": sample.activations["post_block"][1].positions.tolist(),
            }
            for sample in output.outputs
        ],
    }


async def main(model: str, root: str, path: str) -> None:
    engine = await AsyncLLM.create(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        capture_consumers=[f"filesystem:root={root},publish_interval=0.1"],
    )
    saved = {}
    both = {"memory": MEMORY, "filesystem": DISK}
    outputs = await asyncio.gather(
        *(last(engine, p, params(6, both), f"r{i}") for i, p in enumerate(PROMPTS)),
        last(engine, PROMPTS[1], params(4, both, n=2, temperature=1), "two"),
    )
    saved["outputs"] = [saved_output(output) for output in outputs]

    aborted = None
    async for output in engine.generate({"prompt_token_ids": [1, 2]}, params(200, both), "aborted"):
        aborted = output
        if len(output.outputs[0].token_ids) == 3:
            await engine.abort("aborted")
    saved["aborted"] = saved_output(aborted)
    seen = 0
    async for _ in engine.generate({"prompt_token_ids": [3]}, params(200, both), "left"):
        seen += 1
        if seen == 3:
            break
    saved["refused"] = []
    for wrong in (
        {"memory": MEMORY | {"positions": [99]}},
        {"memory": {"hooks": {"post_block": [9]}}},
        {"disc": {}},
    ):
        try:
            await last(engine, [5, 6], params(2, wrong), "wrong")
        except ValueError as error:
            saved["refused"].append(str(error))
    await last(engine, [7], params(2, both), "after")
    for _ in range(100):
        stats = await engine.intervention_stats()
        if not stats[0]["running_sequences"]:
            break
        await asyncio.sleep(0.1)
    saved["stats"] = stats
    engine.shutdown()
    torch.save(saved, path)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
