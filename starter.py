"""Ask one question many times at once, with ESamp, and print what ESamp learned meanwhile.

    python starter.py --max-new-tokens 32

On a GPU the model is Qwen/Qwen2.5-7B-Instruct, without one the demo model of this repository.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from vllm.platforms import current_platform

from tllm import LLM, SamplingParams, clear_consumers, make_llm, register_consumer
from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
GPU_MODEL = "Qwen/Qwen2.5-7B-Instruct"
DEMO_PROMPT = "Tell me a happy story about Mia."
GPU_PROMPT = "Surprise me with an unexpected story about three evil sorcerers and a brave hero."

#: How long the processes of an engine may take to end. vLLM kills them after five seconds, which a
#: busy machine needs, and warns of it.
PATIENCE_S = 60

#: The hook point that a module of a block stands for: a branch for what it returns, a norm for
#: the residual stream that it reads.
_SITE_OF_MODULE = {
    "": "post_block",
    ".input_layernorm": "pre_attn",
    ".self_attn": "attn_out",
    ".post_attention_layernorm": "post_attn",
    ".mlp": "mlp_out",
}
_LAYER_PATH = re.compile(r"(?:model\.)*layers\[(-?\d+)\](\.\w+)?")
_NORM_PATH = re.compile(r"(?:model\.)*norm")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a value that has no meaning here ends the program with a sentence."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    switch = argparse.BooleanOptionalAction

    request = parser.add_argument_group("what is asked")
    request.add_argument("--prompt", help="a sentence; in chat form where the model has one")
    request.add_argument("--num-answers", type=int, default=16)
    request.add_argument("--max-new-tokens", type=int, default=128)
    request.add_argument("--temperature", type=float, default=0.8)
    request.add_argument("--top-p", type=float, default=0.95)
    request.add_argument("--top-k", type=int, default=-1)
    request.add_argument("--min-p", type=float, default=0.1)
    request.add_argument("--seed", type=int, default=2026)
    request.add_argument(
        "--seed-mode",
        choices=("shared", "per-request"),
        default="shared",
        help="shared: the engine's random stream serves all answers, which keeps fused samplers "
        "usable; per-request: answer i has a stream of its own, from seed + i",
    )

    engine = parser.add_argument_group("engine")
    engine.add_argument("--model-name", help=f"default: {GPU_MODEL}; without a GPU, demo/model")
    engine.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    engine.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="default: 0.8. Without a GPU, of the RAM; default: 1 GiB of cache, or "
        "VLLM_CPU_KVCACHE_SPACE",
    )
    engine.add_argument("--max-model-len", type=int, default=512)
    engine.add_argument(
        "--graph-scratch-rows",
        type=int,
        default=0,
        help="tokens the capture ring has room for at first; 0: tLLM's default (it grows)",
    )

    esamp = parser.add_argument_group("ESamp")
    esamp.add_argument(
        "--source-layer-path",
        type=layer_and_site,
        metavar="PATH",
        default=(0, "post_block"),
        help="the shallow row, such as model.model.layers[0] (default)",
    )
    esamp.add_argument(
        "--target-layer-path",
        type=layer_and_site,
        metavar="PATH",
        default=(-1, "lm_head_in"),
        help="the deep row, such as model.model.norm (default)",
    )
    esamp.add_argument("--distiller-lr", type=float, default=1e-3)
    esamp.add_argument("--distiller-beta", type=float, default=0.8, help="strength of guidance")
    esamp.add_argument(
        "--enable-distiller-intervention", action=switch, default=True, help="guide, or only train"
    )
    esamp.add_argument("--model-bank-rank", type=int, default=64, help="width of the distiller")
    esamp.add_argument(
        "--distiller-hidden-dim",
        type=int,
        help="the same width; may not differ from --model-bank-rank",
    )
    esamp.add_argument("--model-bank-slots", type=int, default=8, help="distillers at first")
    esamp.add_argument(
        "--model-bank-flush-interval", type=int, default=1, help="train every n steps"
    )
    esamp.add_argument("--model-bank-train-cudagraph", action=switch, help="default: on a GPU, yes")
    esamp.add_argument(
        "--model-bank-forward-backend",
        choices=("auto", "torch", "triton_grouped"),
        default="auto",
        help="auto: Triton on a GPU, PyTorch without; there is no other combination",
    )
    esamp.add_argument(
        "--distiller-sampler-backend",
        choices=("post_filter_exact",),
        default="post_filter_exact",
        help="guidance sees exactly the candidates that top-k, top-p and min-p left",
    )
    arguments = parser.parse_args(argv)
    if problem := _problem(arguments):
        parser.error(problem)
    on_cpu = current_platform.is_cpu()
    if arguments.model_name is None:
        arguments.model_name = str(DEMO_MODEL) if on_cpu else GPU_MODEL
    if arguments.prompt is None:
        is_demo = Path(arguments.model_name).resolve() == DEMO_MODEL.resolve()
        arguments.prompt = DEMO_PROMPT if is_demo else GPU_PROMPT
    return arguments


def _problem(arguments: argparse.Namespace) -> str | None:
    """Why these arguments cannot be followed, or None."""
    on_cpu = current_platform.is_cpu()
    width, rank = arguments.distiller_hidden_dim, arguments.model_bank_rank
    if width not in (None, rank):
        return (
            f"--distiller-hidden-dim {width} differs from --model-bank-rank {rank}: a distiller "
            "here has one width; give only --model-bank-rank"
        )
    only = "torch" if on_cpu else "triton_grouped"
    if arguments.model_bank_forward_backend not in ("auto", only):
        return (
            f"--model-bank-forward-backend {arguments.model_bank_forward_backend} does not run "
            f"{'without' if on_cpu else 'on'} a GPU; leave it out, or give {only}"
        )
    if arguments.model_bank_train_cudagraph and on_cpu:
        return "--model-bank-train-cudagraph needs a GPU; leave it out"
    for name in ("num_answers", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            return f"--{name.replace('_', '-')} {getattr(arguments, name)} must be 1 or more"
    if arguments.graph_scratch_rows < 0:
        return f"--graph-scratch-rows {arguments.graph_scratch_rows} must be 0 or more"
    try:
        esamp_config(arguments)
    except ValueError as error:
        return str(error)
    return None


def layer_and_site(path: str) -> tuple[int, str]:
    """The layer and the hook point that a module path stands for.

    `model.model.layers[3].input_layernorm` is `(3, "pre_attn")`, the stream that this norm reads;
    `model.model.norm` is `(-1, "lm_head_in")`, what the LM head reads.
    """
    if _NORM_PATH.fullmatch(path):
        return -1, "lm_head_in"
    match = _LAYER_PATH.fullmatch(path)
    if match is None or (match[2] or "") not in _SITE_OF_MODULE:
        known = ", ".join(f"model.model.layers[N]{module}" for module in _SITE_OF_MODULE)
        raise argparse.ArgumentTypeError(
            f"{path!r} is no hook point; choose one of {known}, model.model.norm"
        )
    return int(match[1]), _SITE_OF_MODULE[match[2] or ""]


def esamp_config(arguments: argparse.Namespace) -> ESampConsumerConfig:
    """ESamp as the arguments ask for it."""
    source_layer, source_site = arguments.source_layer_path
    target_layer, target_site = arguments.target_layer_path
    return ESampConsumerConfig(
        source_layer=source_layer,
        source_site=source_site,
        target_layer=target_layer,
        target_site=target_site,
        rank=arguments.model_bank_rank,
        beta=arguments.distiller_beta,
        lr=arguments.distiller_lr,
        train_every_n_steps=arguments.model_bank_flush_interval,
        slots=arguments.model_bank_slots,
        guide=arguments.enable_distiller_intervention,
        cuda_graph=arguments.model_bank_train_cudagraph is not False,
    )


def start(arguments: argparse.Namespace) -> tuple[LLM, ESampConsumer]:
    """An engine with ESamp."""
    esamp = ESampConsumer(esamp_config(arguments))
    clear_consumers()
    register_consumer(esamp)
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(PATIENCE_S))
    utilization = arguments.gpu_memory_utilization
    if utilization is None:
        utilization = 0.8
        if current_platform.is_cpu():
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return make_llm(
        model_name=arguments.model_name,
        dtype=arguments.dtype,
        gpu_memory_utilization=utilization,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.num_answers,
        seed=arguments.seed,
        enforce_eager=current_platform.is_cpu(),
        capture_mib=_capture_mib(arguments),
    ), esamp


def end(llm: LLM) -> None:
    """Wait for the processes of an engine to end."""
    llm.llm_engine.engine_core.shutdown(timeout=PATIENCE_S)


def _capture_mib(arguments: argparse.Namespace) -> int | None:
    """Room for the source and target rows of so many tokens."""
    if not arguments.graph_scratch_rows:
        return None
    config = AutoConfig.from_pretrained(arguments.model_name).get_text_config()
    element = 4 if arguments.dtype == "float32" else 2
    wanted = arguments.graph_scratch_rows * 2 * config.hidden_size * element
    return int(-(-wanted // 2**20))


def ask(llm: LLM, arguments: argparse.Namespace) -> list[str]:
    """The answers."""
    sampling: dict[str, Any] = {
        "max_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "min_p": arguments.min_p,
    }
    count = arguments.num_answers
    if arguments.seed_mode == "shared":
        outputs = _complete(llm, arguments.prompt, [SamplingParams(n=count, **sampling)])
    else:
        # Requests of their own, which share one distiller because they name one group.
        together = {"esamp": {"group": "starter"}}
        seeds = [arguments.seed + i for i in range(count)]
        params = [SamplingParams(seed=seed, consumers=together, **sampling) for seed in seeds]
        outputs = _complete(llm, arguments.prompt, params)
    return [sample.text.strip() for output in outputs for sample in output.outputs]


def _complete(llm: LLM, prompt: str, params: Sequence[Any]) -> list[Any]:
    if llm.get_tokenizer().chat_template:
        message = {"role": "user", "content": prompt}
        return llm.chat([[message]] * len(params), params, use_tqdm=False)
    return llm.generate([prompt] * len(params), params, use_tqdm=False)


def print_statistics(stats: Mapping[str, Any]) -> None:
    """What the distiller learned and what guidance changed."""
    print("ESamp statistics")
    for name in ("loss_mean", "loss_last"):
        print(f"  {name:20}", "none" if stats[name] is None else f"{stats[name]:.5f}")
    counts = ("loss_count", "rows_trained", "predictions", "candidates_seen", "candidates_changed")
    for name in counts:
        print(f"  {name:20}", stats[name])
    print(f"  {'steps_skipped':20}", stats["steps_skipped"] or "none")


def run(llm: LLM, esamp: ESampConsumer, arguments: argparse.Namespace) -> int:
    """Ask, print answers and statistics; 1 when nothing was learned, which is an error."""
    answers = ask(llm, arguments)
    print(
        f"\n{len(answers)} answers in parallel, with ESamp (beta {arguments.distiller_beta}), to:"
    )
    print(f"{arguments.prompt}\n")
    for number, answer in enumerate(answers):
        print(f"[{number:2}] {answer}\n")
    print(f"{len(set(answers))} of {len(answers)} answers are different.\n")
    stats = esamp.read_stats()
    print_statistics(stats)
    if stats["loss_count"] == 0:
        reason = stats["runtime"]["error"] or "no decode row was seen; raise --max-new-tokens"
        print(f"error: the distiller was never trained ({reason})", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = parse_arguments(argv)
    llm, esamp = start(arguments)
    try:
        return run(llm, esamp, arguments)
    finally:
        end(llm)


if __name__ == "__main__":
    sys.exit(main())
