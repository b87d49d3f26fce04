"""Peers that are vLLM, or stand on it."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import torch

from benchmarks.peers.model import CHECKED, summary
from benchmarks.peers.work import LAYERS, Size, Work

_ASKED: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


def options_of(size: Size) -> dict[str, Any]:
    """Arguments of an engine."""
    return {
        "dtype": size.shape.dtype,
        "max_model_len": size.positions,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "block_size": 32,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": size.kv_bytes,
        "disable_log_stats": True,
    }


def prompts_of(tokens: list[list[int]]) -> list[Any]:
    """As vLLM takes them."""
    return [{"prompt_token_ids": each} for each in tokens]


class ServingPeer:
    """A vLLM that is asked to generate."""

    def __init__(self, model: str, size: Size) -> None:
        from vllm import LLM

        self.vocab = size.shape.vocab
        self.llm: Any = LLM(model, **self.options(size))

    def options(self, size: Size) -> dict[str, Any]:
        """Arguments of the engine."""
        return options_of(size)

    def forget(self) -> None:
        """Forget cached prompts: peers and rounds have some in common."""
        assert self.llm.reset_prefix_cache()

    def generate(self, work: Work, number: int, asked: list[dict[str, Any]]) -> list[Any]:
        """Outputs; what is asked of each prompt besides its tokens."""
        from vllm import SamplingParams

        params = [SamplingParams(max_tokens=work.max_tokens, **_ASKED, **each) for each in asked]
        prompts = prompts_of(work.tokens(self.vocab, number))
        return list(self.llm.generate(prompts, params, use_tqdm=False))

    def plain(self, work: Work, number: int) -> Any:
        """Generate, for any work that is not of queries."""
        outputs = self.generate(work, number, [{}] * work.prompts)
        return lambda: [[*output.outputs[0].token_ids] for output in outputs]


class Vllm(ServingPeer):
    """Untouched."""

    def query(self, work: Work, number: int) -> Any:
        """Resubmit every particle at every step, for one drawn token: a bound, not an answer."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, **_ASKED)
        prompt = work.tokens(self.vocab, number)[0]
        fed = work.fed(self.vocab, number)
        for step in range(1, work.steps + 1):
            prompts = prompts_of([prompt + each[:step] for each in fed])
            self.llm.generate(prompts, params, use_tqdm=False)
        return lambda: None


class Tllm(ServingPeer):
    """This one."""

    def __init__(self, model: str, size: Size) -> None:
        from tllm import LLM

        self.vocab = size.shape.vocab
        self.llm = LLM(model, **options_of(size))

    def generate(self, work: Work, number: int, asked: list[dict[str, Any]]) -> list[Any]:
        from tllm import SamplingParams

        params = [SamplingParams(max_tokens=work.max_tokens, **_ASKED, **each) for each in asked]
        prompts = prompts_of(work.tokens(self.vocab, number))
        return list(self.llm.generate(prompts, params, use_tqdm=False))

    def steer(self, work: Work, number: int) -> Any:
        """Vectors after each layer."""
        asked = [
            {
                "steering_vectors": {
                    "post_block": dict(
                        zip(work.steered_layers, work.vectors(i, number), strict=True)
                    )
                }
            }
            for i in range(work.prompts)
        ]
        outputs = self.generate(work, number, asked)
        return lambda: [[*output.outputs[0].token_ids] for output in outputs]

    def capture(self, work: Work, number: int) -> Any:
        """Rows of the prompt after each layer."""
        asked = {"capture": {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}}
        outputs = self.generate(work, number, [asked] * work.prompts)
        found = [output.outputs[0].capture_results["memory"].payload for output in outputs]
        rows = [[each["post_block"][layer].tensor for layer in range(LAYERS)] for each in found]
        return lambda: summary(torch.stack([torch.stack(each) for each in rows]))


class TllmQuery:
    """Lanes, one for each particle."""

    def __init__(self, model: str, size: Size) -> None:
        from tllm.logprobs import AsyncVirtualLM

        self.vocab = size.shape.vocab
        self._lm: Any = AsyncVirtualLM.from_name(model, engine_opts=options_of(size))

    def forget(self) -> None:
        """Forget answers; a round's prompt is its own."""
        self._lm.clear_cache()

    def query(self, work: Work, number: int) -> Any:
        """The whole distribution after each token."""
        found = asyncio.run(self._query(work, number))
        return lambda: torch.stack(found, 1).tolist()

    async def _query(self, work: Work, number: int) -> list[torch.Tensor]:
        root = self._lm.open(work.tokens(self.vocab, number)[0])
        await root.next()
        lanes = [root.fork() for _ in range(work.prompts)]
        await root.close()
        found = []
        fed = work.fed(self.vocab, number)
        for step in range(work.steps):
            for lane, tokens in zip(lanes, fed, strict=True):
                lane.feed(tokens[step])
            found.append((await self._lm.batch_next(lanes))[:, :CHECKED].clone())
        await asyncio.gather(*(lane.close() for lane in lanes))
        return found


class VllmLens(ServingPeer):
    """A plug-in of vLLM, which runs without CUDA graphs and compilation then."""

    def steer(self, work: Work, number: int) -> Any:
        """`SteeringVector`s of each request."""
        from vllm_lens import SteeringVector

        asked = [
            {
                "extra_args": {
                    "apply_steering_vectors": [
                        SteeringVector(
                            activations=torch.from_numpy(work.vectors(i, number)),
                            layer_indices=work.steered_layers,
                        )
                    ]
                }
            }
            for i in range(work.prompts)
        ]
        outputs = self.generate(work, number, asked)
        return lambda: [[*output.outputs[0].token_ids] for output in outputs]

    def capture(self, work: Work, number: int) -> Any:
        """Rows of all tokens that were computed."""
        asked = {"extra_args": {"output_residual_stream": [*range(LAYERS)]}}
        outputs = self.generate(work, number, [asked] * work.prompts)
        kept = [output.activations["residual_stream"] for output in outputs]
        return lambda: summary(torch.stack(kept)[:, :, : work.prompt_tokens])


class VllmExtraction(ServingPeer):
    """A connector of vLLM writes the rows that its drafting model would read to files."""

    def options(self, size: Size) -> dict[str, Any]:
        layers = {"eagle_aux_hidden_state_layer_ids": [*range(1, LAYERS + 1)]}
        return options_of(size) | {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": tempfile.mkdtemp()},
            },
        }

    def capture(self, work: Work, number: int) -> Any:
        """Rows of the prompt, read back from its files."""
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            load_hidden_states,
        )

        outputs = self.generate(work, number, [{}] * work.prompts)
        kept = [
            load_hidden_states(output.kv_transfer_params["hidden_states_path"])["hidden_states"]
            for output in outputs
        ]
        return lambda: summary(torch.stack([each.transpose(0, 1) for each in kept]))
