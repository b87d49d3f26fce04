"""What is measured: model shapes, workloads, and the benchmarks by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Variant = Literal[
    "idle",
    "taps",
    "esamp",
    "steer",
    "capture",
    "decide-same-step",
    "decide-next-step",
    "decide-background",
]


def _compressed(name: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A format of `compressed-tensors`, of all linear layers but the LM head."""
    of_layers = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": of_layers},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
_TOKENS = {**_FLOATS, "strategy": "token", "dynamic": True}
_FORMATS = {
    "fp8": _compressed(
        "float-quantized", {**_FLOATS, "strategy": "channel"}, input_activations=_TOKENS
    ),
    "w4a16": _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    ),
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
}


@dataclass(frozen=True)
class Shape:
    """A Qwen2 or Gemma 3 model, or with experts a Qwen3-MoE model, with weights drawn at random.

    Attributes:
        intermediate: width of the MLP, or of each expert.
        experts: of each layer, of which a token goes to eight; 0 is an MLP.
        quantized: `fp8`, numbers of FP8 with a scale for each output channel and each row;
            `fp8-tensor` and `fp8-blocks`, with one for each weight, or for each block of 128 by
            128 and each 128 numbers of a row; `w4a16` and `awq`, weights of four bits with a
            scale for each 128.
        scale: standard deviation of the logits, which sets how many candidates min-p leaves
            (about 5 to 20 of a large vocabulary at 4.2, temperature 0.8 and min-p 0.05).
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    dtype: str = "bfloat16"
    scale: float = 4.2
    experts: int = 0
    quantized: str = ""
    gemma: bool = False

    def config(self) -> dict[str, Any]:
        """As a Hugging Face config."""
        experts = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "head_dim": 128,
        }
        gemma = {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "hidden_activation": "gelu_pytorch_tanh",
        }
        qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        dense = gemma if self.gemma else qwen
        format_ = _FORMATS.get(self.quantized)
        quantized = {"quantization_config": format_} if format_ else {}
        return (
            (experts if self.experts else dense)
            | quantized
            | {
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "vocab_size": self.vocab,
                "max_position_embeddings": 4096,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "tie_word_embeddings": False,
                "torch_dtype": self.dtype,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("7b", 3584, 18944, 28, 28, 4, 152064),
        Shape("7b-fp8", 3584, 18944, 28, 28, 4, 152064, quantized="fp8"),
        Shape("7b-w4a16", 3584, 18944, 28, 28, 4, 152064, quantized="w4a16"),
        Shape("7b-fp8-tensor", 3584, 18944, 28, 28, 4, 152064, quantized="fp8-tensor"),
        Shape("7b-fp8-blocks", 3584, 18944, 28, 28, 4, 152064, quantized="fp8-blocks"),
        Shape("7b-fp8-deepgemm", 3584, 18944, 28, 28, 4, 152064, quantized="fp8-blocks"),
        Shape("7b-fp8-flashinfer", 3584, 18944, 28, 28, 4, 152064, quantized="fp8-blocks"),
        Shape("7b-awq", 3584, 18944, 28, 28, 4, 152064, quantized="awq"),
        Shape("gemma-4b", 2560, 10240, 34, 8, 4, 262208, gemma=True),
        Shape("1.5b", 1536, 8960, 28, 12, 2, 151936),
        Shape("0.5b", 896, 4864, 24, 14, 2, 151936),
        Shape("moe", 2048, 768, 24, 32, 4, 151936, experts=128),  # half of the layers of 30B-A3B
        Shape("tiny", 128, 256, 4, 4, 2, 512, dtype="float32"),
    )
}


@dataclass(frozen=True)
class Workload:
    """Requests of one round.

    Attributes:
        top_p, top_k: as vLLM has them: 1 and 0 ask for neither.
        ragged: `prompt_tokens` and `max_tokens` are the most; each prompt has its own share of
            both, from a quarter on.
        arrivals: prompts that come in a second, on average (a Poisson process); None: all at once.
    """

    prompts: int = 8
    samples: int = 16
    prompt_tokens: int = 64
    max_tokens: int = 256
    temperature: float = 0.8
    min_p: float = 0.05
    top_p: float = 1.0
    top_k: int = 0
    ragged: bool = False
    arrivals: float | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Generated tokens of one round."""
        return self.prompts * self.samples * self.max_tokens

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What an engine is started with; workloads that agree in it share their engines."""
        return {
            "max_model_len": 2 * (self.prompt_tokens + self.max_tokens),
            "max_num_seqs": self.prompts * self.samples,
            **self.engine,
        }


@dataclass(frozen=True)
class Steered:
    """How the requests of a round are steered.

    Attributes:
        layers: how many are steered, from the middle outwards; None is all.
        vectors: at each of them, each with an operation of its own.
        configurations: distinct ways of steering, dealt out to the prompts in turn.
        method: of every operation (`tllm.spec.methods.METHODS`).
        gated: each configuration has a condition of its own, judged where the first layer begins,
            that decides on all its operations; it holds for about half of the rows.
    """

    layers: int | None = None
    vectors: int = 1
    configurations: int = 1
    method: str = "add"
    gated: bool = False


@dataclass(frozen=True)
class Captured:
    """What the requests of a round capture.

    Attributes:
        layers: how many, from the middle outwards, of `post_block`.
        positions: of each request.
        to_disk: into a sharded store; else to memory, back on the outputs.
        synced: results wait until their rows are on the device.
        one_in: one of so many prompts captures; the others are plain.
    """

    layers: int
    positions: str = "all"
    to_disk: bool = False
    synced: bool = False
    one_in: int = 1

    def is_plain(self, prompt: int) -> bool:
        """Whether a prompt of the round, counted from 0, captures nothing."""
        return prompt % self.one_in != 0


@dataclass(frozen=True)
class Benchmark:
    """One ratio: tLLM doing `variant` to untouched vLLM, on one shape and workload."""

    name: str
    shape: str
    variant: Variant
    workload: Workload = Workload()
    steered: Steered | None = None
    captured: Captured | None = None


def _on(shape: str, workload: Workload = Workload()) -> list[Benchmark]:
    return [
        *(
            Benchmark(f"{variant}-{shape}", shape, variant, workload)
            for variant in ("idle", "taps", "esamp")
        ),
        # Every row has the whole vocabulary as candidates.
        Benchmark(f"esamp-unfiltered-{shape}", shape, "esamp", replace(workload, min_p=0.0)),
    ]


def _multiplied(backend: str) -> Workload:
    """With linear layers by one of vLLM's `linear_backend`s, of which it has several for FP8 in
    blocks."""
    return Workload(engine={"linear_backend": backend})


def _esamp(shape: str, base: Workload, arrivals: float) -> list[Benchmark]:
    """ESamp on other requests, with as many sequences at once, and so on the same engines.

    `n1` and `n64`: as many sequences, of many prompts and of few. `poisson`: three times the
    prompts, ragged, one after the other.
    """
    sequences = base.prompts * base.samples
    engine = base.engine_arguments
    most = min(64, sequences)
    workloads = {
        "n1": replace(base, prompts=sequences, samples=1),
        "n64": replace(base, prompts=sequences // most, samples=most),
        # vLLM draws from these with FlashInfer, where it has it.
        "top-p-top-k": replace(base, min_p=0.0, top_p=0.95, top_k=50),
        "ragged": replace(base, ragged=True),
        "poisson": replace(base, prompts=3 * base.prompts, ragged=True, arrivals=arrivals),
    }
    return [
        Benchmark(f"esamp-{name}-{shape}", shape, "esamp", replace(work, engine=engine))
        for name, work in workloads.items()
    ]


def _decided(shape: str, prompts: int, **sizes: Any) -> list[Benchmark]:
    engine = {"max_num_seqs": 2 * prompts, "max_model_len": _LONGEST}
    work = Workload(prompts=prompts, samples=1, engine=engine, **sizes)
    variants: tuple[Variant, ...] = ("decide-same-step", "decide-next-step", "decide-background")
    return [Benchmark(f"{variant}-{shape}", shape, variant, work) for variant in variants]


DRAFTER = "drafter"
"""In the place of the drafter's folder, in the arguments of an engine."""


def _queued(name: str, shape: str, base: Workload) -> list[Benchmark]:
    """More requests than run at once, of many lengths: one begins where another ends, as where many
    people ask all the time."""
    work = replace(
        base, prompts=3 * base.prompts, ragged=True, engine=base.engine_arguments | base.engine
    )
    return [
        Benchmark(f"idle-{name}-{shape}", shape, "idle", work),
        Benchmark(f"steer-{name}-{shape}", shape, "steer", work, Steered()),
        Benchmark(f"capture-{name}-{shape}", shape, "capture", work, captured=Captured(1)),
    ]


def _drafted(shape: str, base: Workload) -> list[Benchmark]:
    """On engines that draft tokens, see `benchmarks.drafter`."""
    drafts = {"method": "eagle", "model": DRAFTER, "num_speculative_tokens": 3}
    engine = base.engine_arguments | {"speculative_config": drafts}
    work = replace(base, temperature=0.0, min_p=0.0, engine=engine)
    return [
        Benchmark(f"idle-drafts-{shape}", shape, "idle", work),
        Benchmark(f"taps-drafts-{shape}", shape, "taps", work),
        Benchmark(f"steer-drafts-{shape}", shape, "steer", work, Steered()),
        Benchmark(f"capture-drafts-{shape}", shape, "capture", work, captured=Captured(1)),
        *_queued("drafts-queued", shape, work),
    ]


_LONGEST = 1152
"""Tokens of a sequence in benchmarks that share their engines."""

_TINY = Workload(prompts=2, samples=4, prompt_tokens=16, max_tokens=32)

STEERED = {
    "1-layer": Steered(layers=1),
    "all-layers": Steered(),
    "3-vectors": Steered(vectors=3),
    "clamps": Steered(method="ablate"),
    "32-configs": Steered(configurations=32),
    "128-configs": Steered(configurations=128),
    "128-gates": Steered(configurations=128, gated=True),
}


def _steered(shape: str, prompts: int, **sizes: Any) -> list[Benchmark]:
    engine = {"max_num_seqs": 2 * prompts, "max_model_len": _LONGEST}
    many = Workload(prompts=prompts, samples=1, engine=engine, **sizes)
    twice = Workload(prompts=2 * prompts, samples=1, engine=engine, **sizes)
    return [
        *(
            Benchmark(f"steer-{name}-{shape}", shape, "steer", many, steered)
            for name, steered in STEERED.items()
        ),
        Benchmark(f"idle-alone-{shape}", shape, "idle", many),
        Benchmark(f"steer-256-configs-{shape}", shape, "steer", twice, Steered(configurations=256)),
    ]


def _captured(shape: str, layers: int, workload: Workload) -> list[Benchmark]:
    captured = {
        "last-token": Captured(layers, "last_prompt"),
        "1-layer": Captured(1),
        "4-layers": Captured(4),
        "all-layers": Captured(layers),
        "1-layer-to-disk": Captured(1, to_disk=True),
        "4-layers-to-disk": Captured(4, to_disk=True),
        "all-layers-to-disk": Captured(layers, to_disk=True),
        "all-layers-synced": Captured(layers, to_disk=True, synced=True),
        "beside-plain": Captured(layers, one_in=16),
    }
    return [
        Benchmark(f"capture-{name}-{shape}", shape, "capture", workload, captured=each)
        for name, each in captured.items()
    ]


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        *_on("7b"),
        *_on("7b-fp8"),
        *_on("7b-w4a16"),
        *_on("7b-fp8-tensor"),
        *_on("7b-fp8-blocks", _multiplied("cutlass")),
        *_on("7b-fp8-deepgemm", _multiplied("deep_gemm")),
        *_on("7b-fp8-flashinfer", _multiplied("flashinfer_cutlass")),
        *_on("7b-awq"),
        *_on("gemma-4b"),
        *_on("1.5b"),
        *_on("0.5b"),
        *_on("moe"),
        *_on("tiny", _TINY),
        # Prompts of 16 samples for about two thirds of what vLLM can do on an H200.
        *_esamp("7b", Workload(), arrivals=5.0),
        *_esamp("0.5b", Workload(), arrivals=12.0),
        *_esamp("tiny", _TINY, arrivals=40.0),
        *_captured(
            "7b",
            28,
            Workload(
                64,
                1,
                prompt_tokens=512,
                max_tokens=64,
                engine={"max_num_seqs": 256, "max_model_len": _LONGEST},
            ),
        ),
        *_drafted("7b", Workload(prompts=128, samples=1)),
        *_queued("queued", "7b", Workload(prompts=128, samples=1)),
        *_captured("tiny", 4, Workload(16, 1, prompt_tokens=16, max_tokens=8)),
        *_steered("7b", 128),
        *_steered("1.5b", 128),
        *_steered("moe", 128),
        *_decided("7b", 128),
        *_decided("tiny", 8, prompt_tokens=16, max_tokens=32),
        *_steered("tiny", 8, prompt_tokens=16, max_tokens=32),
    )
}
