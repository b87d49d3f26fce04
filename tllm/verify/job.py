"""One verification, from the processes it needs to the certificate."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import EngineArgs

import tllm
from tllm.client.llm import LLM
from tllm.spec.hooks import HookPoint
from tllm.spec.reading import json_lines, prompt_of_line
from tllm.verify.certificate import Certificate
from tllm.verify.memory import Needs, available, needs
from tllm.verify.plain_engine import log_probabilities
from tllm.verify.plain_process import PlainProcess
from tllm.verify.remote_reference import RemoteReference
from tllm.verify.tolerance import Tolerance
from tllm.verify.verifier import STEERED_LAYERS, Verifier

SMALL: Mapping[str, Any] = {
    # Small steps of few requests: prompts are computed in pieces, and requests wait.
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 2**30,
    "disable_log_stats": True,
}
"""Of the engine, unless told."""
LONGEST = 1024
_SHARED = ("revision", "trust_remote_code")
_TRITON_PRECISION = "TRITON_F32_DEFAULT"
"""Environment variable: how Triton's kernels multiply float32. By default with the 10 bits of TF32,
whose rounding is far above the limit of float32."""


@dataclass(frozen=True)
class VerifyJob:
    """What to verify.

    Attributes:
        model: a path or a name on the Hugging Face hub.
        points: hook points to look at; all by default.
        prompts: a file of JSON Lines, texts or objects with `prompt` or `prompt_token_ids`.
        tolerance: the largest relative error to accept, in place of what rounding explains.
        reference: `transformers`, or `plain` for untouched vLLM, which has no rows to compare with.
        reference_device: where `transformers` runs.
        engine: arguments of `tllm.LLM`.
    """

    model: str
    points: tuple[str, ...] | None = None
    prompts: Path | None = None
    tolerance: float | None = None
    steered_layers: int = STEERED_LAYERS
    reference: str = "transformers"
    reference_device: str = "cpu"
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for point in self.points or ():
            HookPoint.parse(point)
        if self.prompts is not None and not self.prompts.is_file():
            raise ValueError(f"prompts {str(self.prompts)!r} is no file; give a file of JSON Lines")
        if self.prompts is not None and not [*_prompts_in(self.prompts)]:
            raise ValueError(
                f"prompts {str(self.prompts)!r} has none; give one or more, each a line"
            )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance {self.tolerance} must be between 0 and 1")
        if self.reference not in ("transformers", "plain"):
            raise ValueError(f"reference {self.reference!r} must be transformers or plain")
        if self.steered_layers < 1:
            raise ValueError(f"steered_layers={self.steered_layers} must be 1 or more")


def run(job: VerifyJob, progress: Callable[[str], None] = lambda text: None) -> Certificate:
    """Verify a model; what cannot be verified is said in the certificate.

    Raises `OSError` where there is no such model, and what vLLM raises where an engine does not
    start.
    """
    with exact_float32(job.engine.get("dtype")):
        return _run(job, progress)


@contextmanager
def exact_float32(dtype: object) -> Iterator[None]:
    """Engines that start inside it multiply float32 in Triton's kernels with all bits, where
    `dtype` is float32 and the user's environment does not say otherwise."""
    wanted = str(dtype).removeprefix("torch.") in ("float32", "float")
    if not wanted or _TRITON_PRECISION in os.environ:
        yield
        return
    os.environ[_TRITON_PRECISION] = "ieee"
    try:
        yield
    finally:
        del os.environ[_TRITON_PRECISION]


def _run(job: VerifyJob, progress: Callable[[str], None]) -> Certificate:
    shared = {name: job.engine[name] for name in _SHARED if name in job.engine}
    process = PlainProcess()
    try:
        needed: Needs = process.ask(needs, job.model, shared)
        engine = _engine_arguments(job, needed)
        _check_generates(job.model, engine)
        why = "plain vLLM was asked for" if job.reference == "plain" else ""
        why = why or needed.unknown or _why_too_large(job, needed, process)
        named = f"transformers {version('transformers')}, float32, on {job.reference_device}"
        certificate = Certificate(job.model, "plain vLLM, the same engine" if why else named)
        progress("starting the engine")
        llm = LLM(job.model, **engine)
        try:
            verifier = _verifier(job, llm, certificate, needed, progress)
            if why:
                served = verifier.serve_plainly(f"transformers was not asked: {why}")
            else:
                options = {"rounded": verifier.dtype, "device": job.reference_device, **shared}
                verifier.compare(RemoteReference(process, job.model, **options))
        finally:
            _shut_down(llm)
            del llm
        if why:
            progress("starting plain vLLM")
            plain = {name: value for name, value in engine.items() if name != "hook_points"}
            sequences = [each.tokens for each in served]
            found = process.ask(log_probabilities, job.model, plain, sequences)
            verifier.compare_plainly(served, found)
        return certificate
    finally:
        process.close()


def _engine_arguments(job: VerifyJob, needed: Needs) -> dict[str, Any]:
    from vllm.platforms import current_platform

    engine: dict[str, Any] = {
        **SMALL,
        "dtype": "float32" if current_platform.is_cpu() else "bfloat16",
        "max_model_len": min(needed.longest or LONGEST, LONGEST),
        "hook_points": job.points or "all",
        "skip_tokenizer_init": job.prompts is None,
        **job.engine,
    }
    if needed.multimodal:
        engine.setdefault("limit_mm_per_prompt", {"image": 0, "video": 0})
    if job.engine.keys() & {"gpu_memory_utilization", "num_gpu_blocks_override"}:
        engine = {**engine, "kv_cache_memory_bytes": job.engine.get("kv_cache_memory_bytes")}
    return engine


def _check_generates(model: str, engine: Mapping[str, Any]) -> None:
    """Refuse a model of which there is nothing to compare, before an engine starts."""
    known = {field.name for field in fields(EngineArgs)}
    given = {name: value for name, value in engine.items() if name in known}
    config = EngineArgs(model, **given).create_model_config()
    if config.runner_type != "generate":
        raise ValueError(
            f"{model!r} ({config.architecture}) is a model for {config.runner_type}, and what "
            "`tllm verify` compares is generated text; `tllm doctor --model` says which hook "
            "points it has"
        )


def _why_too_large(job: VerifyJob, needed: Needs, process: PlainProcess) -> str:
    free = process.ask(available, job.reference_device)
    if needed.bytes <= free:
        return ""
    return (
        f"in float32 it needs {needed.bytes / 2**30:.1f} GiB on {job.reference_device}, where "
        f"{free / 2**30:.1f} GiB are free"
    )


def _verifier(
    job: VerifyJob,
    llm: LLM,
    certificate: Certificate,
    needed: Needs,
    progress: Callable[[str], None],
) -> Verifier:
    config = llm.llm_engine.vllm_config
    dtype = config.model_config.dtype
    layers = llm.steering.layers()["num_layers"]
    certificate.engine = {
        "tllm": tllm.__version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": config.device_config.device_type,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "dtype": str(dtype).removeprefix("torch."),
        "architecture": config.model_config.architecture,
        "num_layers": layers,
        "options": {name: _shown(value) for name, value in job.engine.items()},
    }
    if needed.experts and dtype != torch.float32:
        certificate.notes.append(
            "which experts are chosen may hang on rounding: where rows differ, see whether they do "
            "with --dtype float32, too"
        )
    if config.device_config.device_type == "cuda" and dtype == torch.float32:
        precision = os.environ.get(_TRITON_PRECISION, "tf32")
        certificate.engine["triton_float32"] = precision
        certificate.notes.append(
            "Triton's kernels multiplied float32 with all bits (TRITON_F32_DEFAULT=ieee); without "
            "this setting an engine multiplies with TF32 there"
            if precision == "ieee"
            else f"Triton's kernels multiplied float32 with {precision}, whose rounding may be "
            "above the limit: where rows differ, see whether they do with TRITON_F32_DEFAULT=ieee"
        )
    tolerance = None if job.tolerance is None else Tolerance.of(dtype, layers, job.tolerance)
    return Verifier(
        llm,
        certificate,
        points=None if job.points is None else [str(HookPoint.parse(p)) for p in job.points],
        tolerance=tolerance,
        given=_given_prompts(job.prompts, llm) if job.prompts else (),
        steered_layers=job.steered_layers,
        progress=progress,
    )


def _prompts_in(path: Path) -> Iterator[tuple[int, str | list[int]]]:
    """Number and prompt of each line; `ValueError` names the line that is wrong."""
    for number, entry in json_lines(path):
        yield number, prompt_of_line(entry, path, number)


def _given_prompts(path: Path, llm: LLM) -> list[list[int]]:
    """Token ids of the user's prompts; `ValueError` names the line that is wrong."""
    found: list[list[int]] = []
    longest = llm.llm_engine.model_config.max_model_len - 8
    for number, prompt in _prompts_in(path):
        tokens = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        if not 0 < len(tokens) <= longest:
            raise ValueError(
                f"{path}, line {number} has {len(tokens)} tokens; give 1 to {longest}, or a larger "
                "--max-model-len"
            )
        found.append(list(tokens))
    return found


def _shown(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _shut_down(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    gc.collect()
