"""Prompts, requests, and what their rows must be."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from vllm.outputs import RequestOutput

from engine.recorder import Recorder
from engine.reference import VOCAB, Place, Reference
from tllm import SamplingParams

RELATIVE = 2e-5
"""Largest error of a row, relative to the row's norm: float32 sums in another order."""


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths; token 0 (EOS) is not among them."""
    pick = random.Random(seed)
    return [[pick.randrange(1, VOCAB) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int, **kwargs):
    """Greedy sampling of exactly `max_tokens` tokens."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kwargs
    )


def sampled(max_tokens: int, **kwargs):
    """Sampling of exactly `max_tokens` tokens, at temperature 1 unless told."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kwargs)


def generate(llm, prompts: Sequence[Sequence[int]], params) -> list[RequestOutput]:
    """Outputs for prompts given as tokens; `params` is one, or one each."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm.generate(inputs, params, use_tqdm=False)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The generated tokens of sample 0 of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def error_of(row: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of a row."""
    return float((row - expected).norm() / expected.norm())


def assert_rows_match(
    recorder: Recorder,
    outputs: Sequence[RequestOutput],
    reference: Reference,
    places: Mapping[str, Place],
    *,
    phase: str = "any",
    additions: Mapping[str, list] | None = None,
    flow: int = 0,
) -> None:
    """Every token of every output that passed the model gave one row, and the right one.

    Args:
        places: where each role was read.
        additions: by request id, what was added in the model.
    """
    rows = {role: recorder.rows(role, flow) for role in places}
    expected_keys = set()
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        for completion in output.outputs:
            tokens = [*prompt, *completion.token_ids][:-1]
            added = (additions or {}).get(output.request_id, [])
            _, states = reference.run(tokens, list(places.values()), added)
            low = len(prompt) if phase == "decode" else 0
            high = len(prompt) if phase == "prefill" else len(tokens)
            for position in range(low, high):
                key = (output.request_id, completion.index, position)
                expected_keys.add(key)
                for role, place in places.items():
                    error = error_of(rows[role][key], states[place][position])
                    assert error < RELATIVE, f"{role} of {key} is off by {error}"
    for role in places:
        assert set(rows[role]) == expected_keys
