"""A quantized model: its rows are those of the same quantized model in plain vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engines import SHARE

from engine.reference import LAYERS, save_tiny_model
from tllm.engine.quantized_norms import QuantizedNorms

PROMPT = [7, 30, 12, 55, 21, 3, 90, 41]
GROUP = 32
BLOCK = 128
HIDDEN = 256

OPTIONS: dict[str, Any] = {
    **SHARE,
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
}
PARAMS: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
    "detokenize": False,
}


def _eight_bits(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whole numbers, with one scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        f"{name}.weight": (weight / scale).round().to(torch.int8),
        f"{name}.weight_scale": scale,
    }


def _eight_bit_floats(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`float8_e4m3fn`, with one scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
    }


def _one_scale_floats(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`float8_e4m3fn`, with one scale for the whole weight."""
    scale = weight.abs().amax() / 448
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
    }


def _given_scale_floats(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same, and one scale for whatever is multiplied with it."""
    given = {f"{name}.input_scale": torch.tensor([0.02])}
    return given | {
        key: each.reshape(1) if key.endswith("scale") else each
        for key, each in _one_scale_floats(name, weight).items()
    }


def _block_floats(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`float8_e4m3fn`, with one scale for each block of 128 by 128."""
    blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = blocks / scale[:, None, :, None]
    return {
        f"{name}.weight": numbers.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": scale,
    }


def _as_they_are(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """To be quantized when they are loaded."""
    return {f"{name}.weight": weight}


def _words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers of four bits in a word, along the last dimension, `order[0]` in its lowest."""
    eights = numbers.long().unflatten(-1, (-1, 8))[..., list(order)]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _four_bit_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers 0 to 15 `[outputs, inputs]` with 8 for zero, and a scale for each group of inputs."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 7
    return (groups / scale[..., None]).round().flatten(1) + 8, scale.to(torch.float16)


def _four_bits(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `compressed-tensors` writes them."""
    numbers, scale = _four_bit_groups(weight)
    return {
        f"{name}.weight_packed": _words(numbers),
        f"{name}.weight_scale": scale.to(torch.bfloat16),
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def _gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As GPTQ writes them: words along the inputs, and zeros less one."""
    numbers, scale = _four_bit_groups(weight)
    return {
        f"{name}.qweight": _words(numbers).T.contiguous(),
        f"{name}.qzeros": _words(torch.full_like(scale.T, 7)),
        f"{name}.scales": scale.T.contiguous(),
        f"{name}.g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }


def _awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As AWQ writes them: words along the outputs, in an order of their own."""
    numbers, scale = _four_bit_groups(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{name}.qweight": _words(numbers.T, order),
        f"{name}.qzeros": _words(torch.full_like(scale.T, 8), order),
        f"{name}.scales": scale.T.contiguous(),
    }


def _compressed(name: str, weights: dict[str, Any], activations: Any = None) -> dict[str, Any]:
    """The configuration of a format of `compressed-tensors`."""
    parts: dict[str, Any] = {"weights": {"symmetric": True, **weights}}
    if activations:
        parts["input_activations"] = {**parts["weights"], **activations}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], **parts}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_CHANNEL = {"num_bits": 8, "strategy": "channel", "dynamic": False}
_TENSOR = {**_CHANNEL, "strategy": "tensor"}
_TOKENS = {"strategy": "token", "dynamic": True}
_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
KINDS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "W8A8": (
        _eight_bits,
        _compressed("int-quantized", {"type": "int", **_CHANNEL}, _TOKENS),
    ),
    "W4A16": (_four_bits, _compressed("pack-quantized", _INT4)),
    "FP8": (
        _eight_bit_floats,
        _compressed("float-quantized", {"type": "float", **_CHANNEL}, _TOKENS),
    ),
    "FP8, one scale": (
        _one_scale_floats,
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    "FP8, blocks": (_block_floats, _BLOCKS),
    "FP8, blocks, DeepGEMM": (_block_floats, _BLOCKS),
    "FP8, blocks, FlashInfer": (_block_floats, _BLOCKS),
    "FP8, online": (_as_they_are, None),
    "FP8, given scales": (
        _given_scale_floats,
        _compressed("float-quantized", {"type": "float", **_TENSOR}, _TENSOR),
    ),
    "GPTQ": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "AWQ": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
        | {"version": "gemm"},
    ),
}
"""How a linear layer's weight is written, and what the model's configuration says of it (None: the
engine is told to quantize)."""
FOUR_BITS = "W4A16", "GPTQ", "AWQ"
BACKENDS = {
    "FP8, blocks": "cutlass",
    "FP8, blocks, DeepGEMM": "deep_gemm",
    "FP8, blocks, FlashInfer": "flashinfer_cutlass",
}
"""What vLLM multiplies with, where it can choose; the last makes its FP8 numbers itself."""
ON_A_GPU = "FP8, one scale", "FP8, given scales", "FP8, online", *BACKENDS


def four_bits_run() -> bool:
    """Whether vLLM multiplies with numbers of four bits on this machine."""
    import vllm._custom_ops  # noqa: F401 - loads the kernels that the CPU has instructions for

    return torch.cuda.is_available() or hasattr(torch.ops._C, "cpu_gemm_wna16")


def cannot_run(kind: str) -> str:
    """Why vLLM has no kernel for a kind of model here."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    if kind in ON_A_GPU and not torch.cuda.is_available():
        return "vLLM has no such kernel for a CPU"
    if kind in FOUR_BITS and not four_bits_run():
        return "vLLM has no such kernel for a CPU without AVX-512, as this one"
    if BACKENDS.get(kind, "cutlass") != "cutlass" and not is_deep_gemm_e8m0_used():
        return "DeepGEMM is not here, or does not run on this GPU"
    return ""


def quantized(folder: Path, kind: str) -> dict[str, Any]:
    """Write a checkpoint. Returns the arguments that an engine takes with it."""
    save_tiny_model(folder, hidden=HIDDEN)
    written, config = KINDS[kind]
    file = folder / "model.safetensors"
    weights: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(file).items():
        name = key.removesuffix(".weight")
        is_linear = "_proj." in key and name != key
        weights |= written(name, tensor.float()) if is_linear else {key: tensor}
    save_file(weights, file, metadata={"format": "pt"})
    model = json.loads((folder / "config.json").read_text())
    if config is None:
        return {**OPTIONS, "quantization": "fp8"}
    (folder / "config.json").write_text(json.dumps({**model, "quantization_config": config}))
    return {**OPTIONS, "linear_backend": BACKENDS[kind]} if kind in BACKENDS else OPTIONS


def plain(folder: Path, options: dict[str, Any]) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Tokens, and what leaves each block for the prompt, in vLLM with forward hooks alone."""
    import vllm

    llm = vllm.LLM(str(folder), **options)
    rows: dict[int, torch.Tensor] = {}

    def watch(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):

            def hook(_: Any, __: Any, output: Any, number: int = number) -> None:
                rows.setdefault(number, (output[0].float() + output[1].float()).cpu())

            layer.register_forward_hook(hook)

    llm.apply_model(watch)
    params = vllm.SamplingParams(**PARAMS)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_quantized_model_are_those_of_plain_vllm(kind: str, tmp_path: Path) -> None:
    from tllm import LLM, SamplingParams

    if reason := cannot_run(kind):
        pytest.skip(reason)
    options = quantized(tmp_path, kind)
    tokens, expected = plain(tmp_path, options)
    llm = LLM(str(tmp_path), **options, hook_points="all")
    method = (KINDS[kind][1] or {"quant_method": "fp8"})["quant_method"]
    assert method in str(llm.llm_engine.model_config.quantization)
    capture = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}

    def run(**asked: Any) -> Any:
        params = SamplingParams(**PARAMS, capture=capture, **asked)
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        return output

    output = run()
    assert list(output.outputs[0].token_ids) == tokens
    rows = output.activations["post_block"]
    for layer in range(LAYERS):
        # The sum of branch and residual is rounded to bfloat16 once.
        torch.testing.assert_close(
            rows[layer].tensor.float(), expected[layer], rtol=2**-8, atol=1e-6
        )
    steered = run(steering_vectors={"post_block": {0: [3.0] * HIDDEN}}).activations["post_block"]
    assert torch.equal(steered[0].tensor, rows[0].tensor)
    assert not torch.allclose(steered[1].tensor, rows[1].tensor, atol=0.5)


def _likely(output: Any) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens after the first."""
    told = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([of[token].logprob for token, of in told])


def _fused_and_matched(worker: Any) -> tuple[int, int]:
    """Sent to a worker: norms that are computed with taps, and with FP8 numbers."""
    compiling = worker.worker.vllm_config.compilation_config.inductor_compile_config
    found = [each for each in compiling.values() if isinstance(each, QuantizedNorms)]
    return worker.worker.session._taps.norms_fused, sum(each.matched for each in found)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="without a GPU no norm is computed with its tap"
)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_a_compiled_quantized_model_are_computed_with_their_taps(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tllm import LLM, SamplingParams

    if reason := cannot_run(kind):
        pytest.skip(reason)
    # What is found in a cache is matched no more.
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    options = quantized(tmp_path, kind) | {"enforce_eager": False}
    options["cudagraph_capture_sizes"] = [1, 8]
    capture = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}

    def run(llm: LLM, **asked: Any) -> Any:
        params = SamplingParams(**PARAMS, prompt_logprobs=0, **asked)
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        return output

    llm = LLM(str(tmp_path), **options, fuse_norms=False)
    assert llm.collective_rpc(_fused_and_matched) == [(0, 0)]
    expected = run(llm, capture=capture)
    del llm
    llm = LLM(str(tmp_path), **options)
    [(fused, matched)] = llm.collective_rpc(_fused_and_matched)
    assert fused == 2 * LAYERS
    # Blocks that are alike are compiled once; behind the last norm nothing is quantized.
    numbers = kind.startswith("FP8") and BACKENDS.get(kind) != "flashinfer_cutlass"
    assert matched >= 3 if numbers else matched == 0
    found = run(llm, capture=capture)
    # A norm's sum in another order may make another number of FP8 of a value between two, of which
    # blocks make more: log-probabilities of vLLM without taps are further away (0.26 RMS).
    apart = 0.3 if kind.startswith("FP8") else 0.02
    torch.testing.assert_close(_likely(found), _likely(expected), rtol=0, atol=apart)
    for layer in range(LAYERS):
        rows, others = (
            each.activations["post_block"][layer].tensor.float() for each in (found, expected)
        )
        assert (rows - others).norm() < apart / 3 * others.norm()
    steered = run(llm, steering_vectors={"post_block": {0: [3.0] * HIDDEN}})
    assert not torch.allclose(_likely(steered), _likely(expected), atol=0.1)
