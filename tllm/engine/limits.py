"""What does not work together with interventions is refused when the engine starts.

In the user's process where the engine's arguments or its config say so; what only a worker finds
out is told to the user's process through a file, since vLLM itself passes no reason on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs

from tllm.engine import versions
from tllm.engine.drafts import METHODS
from tllm.engine.seams import uses

_NOTE = "tllm_note"
"""Key of `VllmConfig.additional_config`: the file for the worker's reason."""

_LANGUAGE = "an engine that has no language model is refused"
_DIFFUSION = "a model that computes its tokens anew until they stay is refused"
_DRAFTING = "speculative decoding where drafts can be told from tokens"
uses("vllm.envs", "VLLM_USE_RUST_FRONTEND", "it is refused")
uses(
    "vllm.config.VllmConfig",
    "speculative_config parallel_config compilation_config kv_transfer_config additional_config "
    "use_v2_model_runner",
    "configurations under which rows could be misread are refused",
)
uses("vllm.config.VllmConfig", "ec_transfer_config model_config", _LANGUAGE)
uses("vllm.config.ModelConfig", "multimodal_config", _LANGUAGE)
uses("vllm.config.MultiModalConfig", "mm_encoder_only", _LANGUAGE)
uses("vllm.config.ECTransferConfig", "is_ec_producer is_ec_consumer", _LANGUAGE)
uses("vllm.config.VllmConfig", "diffusion_config model_config", _DIFFUSION)
uses("vllm.config.ModelConfig", "is_diffusion", _DIFFUSION)
uses("vllm.config.VllmConfig", "scheduler_config", _DRAFTING)
uses("vllm.config.SpeculativeConfig", "method enable_adaptive_verification", _DRAFTING)
uses("vllm.config.SchedulerConfig", "async_scheduling", _DRAFTING)
uses(
    "vllm.config.ParallelConfig",
    "tensor_parallel_size pipeline_parallel_size use_ubatching use_sequence_parallel_moe use_ray "
    "decode_context_parallel_size prefill_context_parallel_size distributed_executor_backend",
    "configurations under which rows could be misread are refused",
)
uses(
    "vllm.config.ParallelConfig",
    "enable_batch_sharded_sampling",
    "sampling where a rank has the logits of some sequences only is refused",
)


@dataclass(frozen=True)
class Limit:
    """A configuration that is refused.

    Attributes:
        refusal: what is refused, why, and what to do.
        found: whether a `VllmConfig` has it.
        asked: whether engine arguments ask for it, as far as they say.
    """

    refusal: str
    found: Callable[[Any], bool]
    asked: Callable[[Mapping[str, Any]], bool] = lambda arguments: False


def _other_than(**off: tuple[Any, ...]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether engine arguments have other values than these, which are those of what is off."""
    return lambda arguments: any(
        arguments.get(n, values[0]) not in values for n, values in off.items()
    )


def _drafts(config: Any) -> bool:
    return config.speculative_config is not None


def _asks_for_another_method(arguments: Mapping[str, Any]) -> bool:
    config = arguments.get("speculative_config")
    method = config.get("method") if isinstance(config, Mapping) else None
    return isinstance(method, str) and method not in METHODS and not method.endswith("_mtp")


def _asks_for_adaptive_verification(arguments: Mapping[str, Any]) -> bool:
    config = arguments.get("speculative_config")
    return isinstance(config, Mapping) and bool(config.get("enable_adaptive_verification"))


def _launched_by_others(backend: Any, ranks: int, stages: int) -> bool:
    return backend == "external_launcher" and ranks * stages > 1


def _encodes_alone(config: Any) -> bool:
    transfer, media = config.ec_transfer_config, config.model_config.multimodal_config
    produces = transfer is not None and transfer.is_ec_producer and not transfer.is_ec_consumer
    return produces or (media is not None and media.mm_encoder_only)


def _asks_to_encode_alone(arguments: Mapping[str, Any]) -> bool:
    transfer = arguments.get("ec_transfer_config")
    role = transfer.get("ec_role") if isinstance(transfer, Mapping) else None
    return role == "ec_producer" or bool(arguments.get("mm_encoder_only"))


LIMITS = (
    Limit(
        "speculative decoding by this method (how its drafts are told from tokens is not known): "
        f"set the method of speculative_config to one of {', '.join(METHODS)}, or leave it out",
        lambda config: _drafts(config) and config.speculative_config.method not in METHODS,
        _asks_for_another_method,
    ),
    Limit(
        "speculative decoding and async scheduling on the V1 model runner (a step begins before it "
        "is known how many drafted tokens of the last one are accepted): set "
        "async_scheduling=False or VLLM_USE_V2_MODEL_RUNNER=1, or leave out speculative_config",
        lambda config: (
            _drafts(config)
            and config.scheduler_config.async_scheduling
            and not config.use_v2_model_runner
        ),
    ),
    Limit(
        "adaptive verification of drafts (the device deals drafts out anew, and only it knows "
        "whose each row is): set enable_adaptive_verification=False in speculative_config",
        lambda config: _drafts(config) and config.speculative_config.enable_adaptive_verification,
        _asks_for_adaptive_verification,
    ),
    Limit(
        "speculative decoding over pipeline stages (only the last one knows how many drafted "
        "tokens are accepted): set pipeline_parallel_size=1, or leave out speculative_config",
        lambda config: _drafts(config) and config.parallel_config.pipeline_parallel_size > 1,
        lambda asked: (
            asked.get("speculative_config") is not None
            and (asked.get("pipeline_parallel_size") or 1) > 1
        ),
    ),
    Limit(
        "several ranks of one replica under distributed_executor_backend='external_launcher' (each "
        "rank has a front end that reaches its own worker alone, and results are with the first): "
        "set distributed_executor_backend='mp' and start one process, or leave one rank to each "
        "replica (tensor_parallel_size=1 and pipeline_parallel_size=1)",
        lambda config: _launched_by_others(
            config.parallel_config.distributed_executor_backend,
            config.parallel_config.tensor_parallel_size,
            config.parallel_config.pipeline_parallel_size,
        ),
        lambda asked: _launched_by_others(
            asked.get("distributed_executor_backend"),
            asked.get("tensor_parallel_size") or 1,
            asked.get("pipeline_parallel_size") or 1,
        ),
    ),
    Limit(
        "dual batch overlap (it splits a batch in two): leave out enable_dbo and ubatch_size",
        lambda config: config.parallel_config.use_ubatching,
        _other_than(enable_dbo=(False,), ubatch_size=(0, 1)),
    ),
    Limit(
        "context parallelism (it splits a sequence over ranks): set decode_context_parallel_size=1",
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
        _other_than(decode_context_parallel_size=(1,)),
    ),
    Limit(
        "context parallelism (it splits a prompt over ranks): set prefill_context_parallel_size=1",
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
        _other_than(prefill_context_parallel_size=(1,)),
    ),
    Limit(
        "KV connectors and offloading (the rows of a block that they load are never computed, and "
        "they may load a steered block for a plain one): leave out kv_transfer_config and "
        "kv_offloading_size",
        lambda config: config.kv_transfer_config is not None,
        _other_than(kv_transfer_config=(None,), kv_offloading_size=(None,)),
    ),
    Limit(
        "an engine that encodes images and sounds alone (it does not run the language model, whose "
        "rows would be read and changed): set ec_role='ec_both' or 'ec_consumer' in "
        "ec_transfer_config, leave out mm_encoder_only, or start that engine with vLLM's own "
        "classes",
        _encodes_alone,
        _asks_to_encode_alone,
    ),
    Limit(
        "a diffusion language model (it computes a block of tokens again and again until they "
        "stay, so that a token has no one row): leave out diffusion_config, and start it with "
        "vLLM's own classes",
        lambda config: config.diffusion_config is not None or config.model_config.is_diffusion,
        _other_than(diffusion_config=(None,)),
    ),
    Limit(
        "sequence parallelism (it gives each rank a part of the rows): set "
        "compilation_config.pass_config.enable_sp=False",
        lambda config: versions.sequence_parallel(config.compilation_config.pass_config),
    ),
    Limit(
        "experts on several tensor-parallel ranks of several replicas (each rank has a part of the "
        "rows): leave out enable_expert_parallel, or set tensor_parallel_size=1",
        lambda config: config.parallel_config.use_sequence_parallel_moe,
    ),
    Limit(
        "batch-sharded sampling (each tensor-parallel rank has the logits of a part of the "
        "sequences): set enable_batch_sharded_sampling=False",
        lambda config: bool(getattr(config.parallel_config, "enable_batch_sharded_sampling", None)),
        _other_than(enable_batch_sharded_sampling=(None, False)),
    ),
    Limit(
        "kernels whose compilation ends an engine that runs (those of a consumer or of a feature "
        "are compiled when it is used first): set jit_monitor_mode='warn'",
        lambda config: getattr(config.observability_config, "jit_monitor_mode", "") == "error",
        _other_than(jit_monitor_mode=("warn",)),
    ),
    Limit(
        "vLLM's older Ray executor (it runs the model behind the worker's back): set "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1",
        lambda config: config.parallel_config.use_ray and versions.bypasses_worker(config),
    ),
    Limit(
        "vLLM's front end in Rust (requests would pass tLLM by): set VLLM_USE_RUST_FRONTEND=0",
        lambda config: envs.VLLM_USE_RUST_FRONTEND,
    ),
)


def check(vllm_config: Any) -> None:
    """Raise `ValueError` for a configuration under which rows could be misread."""
    _refuse([limit for limit in LIMITS if limit.found(vllm_config)])


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """The same for engine arguments, as far as they say it: no config was made of them yet."""
    _refuse([limit for limit in LIMITS if limit.asked(kwargs)])


def _refuse(limits: list[Limit]) -> None:
    if limits:
        refusals = "; nor with ".join(limit.refusal for limit in limits)
        raise ValueError(f"tLLM does not run with {refusals}")


@contextmanager
def told(additional_config: Any) -> Iterator[None]:
    """Start an engine in here, which has this `additional_config`.

    Raises:
        ValueError: in the place of whatever vLLM raises, when a worker of this host (or one that
            has the same temporary folder) told why it does not start.
    """
    if not isinstance(additional_config, dict):  # vLLM takes an object of the user's, too
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tllm-start-") as folder:
        note = Path(folder, "note")
        try:
            additional_config[_NOTE] = str(note)
            yield
        except Exception as error:
            if note.exists():
                raise ValueError(note.read_text()) from error
            raise
        finally:
            del additional_config[_NOTE]


def pop_note(vllm_config: Any) -> Path | None:
    """In a worker: take the file for its reason out of `additional_config`, which is part of the
    key of the compile cache; None where there is none, as on another host."""
    config = dict(vllm_config.additional_config or {})
    note = config.pop(_NOTE, None)
    vllm_config.additional_config = config
    return Path(note) if note is not None and Path(note).parent.is_dir() else None


@contextmanager
def reported(note: Path | None) -> Iterator[None]:
    """In a worker: tell the user's process of a `ValueError`, and raise it."""
    try:
        yield
    except ValueError as error:
        if note is not None:
            note.write_text(str(error))
        raise
