"""What the runtime needs to know of a loaded model: sizes, final norm, LM head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_reduce,
)
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tllm.engine import quantized_norms, versions
from tllm.engine.seams import uses
from tllm.models.sites import ModelSites
from tllm.ports import ModelView
from tllm.runtime.kernels.candidates import CandidateRows
from tllm.runtime.sampling import LmHead
from tllm.runtime.taps import AddedNorm
from tllm.spec.hooks import HookPoint

_PROJECTED = "candidates are projected on the LM head"
_COMPARED = "the model's own logits are compared with the LM head's, without any adapter"
uses(
    "vllm.model_executor.layers.layernorm.RMSNorm",
    "weight has_weight variance_epsilon variance_size_override",
    "taps are computed together with the norm after them; consumers may apply the final norm",
)
uses(
    "vllm.model_executor.layers.layernorm.GemmaRMSNorm",
    "weight variance_epsilon",
    "consumers may apply the final norm",
)
uses("vllm.model_executor.layers.logits_processor.LogitsProcessor", "scale soft_cap", _PROJECTED)
uses(
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding",
    "shard_indices",
    _PROJECTED,
)
uses(
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbeddingShardIndices",
    "org_vocab_start_index org_vocab_end_index",
    _PROJECTED,
)
uses("vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA", "punica_wrapper", _COMPARED)
uses(
    "vllm.lora.punica_wrapper.punica_base.PunicaWrapperBase",
    "add_lora_logits",
    _COMPARED,
    takes="y x lora_a_stacked lora_b_stacked scale",
)
uses("vllm.config.ParallelConfig", "data_parallel_index tensor_parallel_size", "which worker it is")
uses(
    "vllm.config.ModelConfig",
    "model served_model_name dtype runner_type get_vocab_size hf_text_config",
    "sizes of the model, for consumers",
)
uses(
    "vllm.config.ModelConfig",
    "is_multimodal_model enable_prompt_embeds",
    "whether a forward pass begins by looking up embeddings",
)
uses(
    "vllm.config.SchedulerConfig",
    "max_num_seqs max_num_batched_tokens async_scheduling",
    "room for the rows and sequences of a step",
)
uses("vllm.config.CompilationConfig", "cudagraph_capture_sizes", "room for the rows of a step")
uses("vllm.envs", "VLLM_BATCH_INVARIANT", "norms of another order of sums are left to vLLM")


def embeds_tokens(vllm_config: Any) -> bool:
    """Whether the model's forward pass begins by looking up the embeddings of its tokens."""
    config = vllm_config.model_config
    is_given_embeddings = config.is_multimodal_model or config.enable_prompt_embeds
    return bool(get_pp_group().is_first_rank and not is_given_embeddings)


def is_last_stage() -> bool:
    """Whether this rank samples."""
    return bool(get_pp_group().is_last_rank)


def max_batch_tokens(vllm_config: Any) -> int:
    """The most rows a forward pass has, padding included."""
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    captured = max(compilation.cudagraph_capture_sizes or [0])
    tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, captured)
    return -(-tokens // 256) * 256 + 256


def describe(
    vllm_config: Any, sites: ModelSites, device: torch.device, head: LmHead | str | None
) -> ModelView:
    """What consumers may know of the model.

    Args:
        head: see `lm_head`.
    """
    norm = None
    weight: torch.Tensor | None = None
    eps: float | None = None
    site = sites.sites.get((HookPoint.LM_HEAD_IN, None))
    if site is not None:
        module = site.module
        if isinstance(module, GemmaRMSNorm):
            weight, eps = 1.0 + module.weight.detach().float(), module.variance_epsilon
        elif isinstance(module, RMSNorm) and module.weight is not None:
            weight, eps = module.weight.detach(), module.variance_epsilon

        def norm(x: torch.Tensor) -> torch.Tensor:
            # Not a call, which would run the taps on rows that are not of the batch.
            output = type(module).forward(module, x)
            return output[0] if isinstance(output, tuple) else output

    config = vllm_config.model_config
    vocab_size = config.get_vocab_size()
    return ModelView(
        hidden_size=sites.hidden_size,
        num_layers=sites.points.num_layers,
        vocab_size=vocab_size,
        dtype=config.dtype,
        device=device,
        final_norm=norm,
        final_norm_weight=weight,
        final_norm_eps=eps,
        one_stream=sites.points.one_stream,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        **_place_of_worker(vllm_config),
        name=str(config.served_model_name or config.model),
        **_lm_head_port(head, vocab_size),
    )


def _lm_head_port(head: LmHead | str | None, vocab_size: int) -> dict[str, Any]:
    if isinstance(head, LmHead):
        return {
            "lm_head": partial(head.dense_logits, vocab=vocab_size),
            "lm_head_is_shared": head.reduce is not None,
        }
    if head is None:
        head = "the LM head is on the last pipeline stage, and in models that generate"
    return {"lm_head_refusal": head}


def _place_of_worker(vllm_config: Any) -> dict[str, Any]:
    """Where in the cluster this worker is."""
    stage, rank = get_pp_group(), get_tp_group()
    # The rank of a replica of a dense model is 0: it knows nothing of the others.
    replica = vllm_config.parallel_config.data_parallel_index
    return {
        "worker": f"dp{replica}-pp{stage.rank_in_group}-tp{rank.rank_in_group}",
        "first_rank": rank.rank_in_group == 0,
        "stage": stage.rank_in_group,
        "num_stages": stage.world_size,
    }


def added_norm(vllm_config: Any, module: torch.nn.Module) -> AddedNorm | None:
    """The norm of a sum of stream and residual, if `module` is one that we compute as vLLM does.

    That is the formula that vLLM gives to its compiler. Its ready-made kernels, which it prefers
    without a compiler, round in other places; with some quantized models it fuses norms with what
    follows them; with batch invariance it computes them in an order of its own.
    """
    plain = type(module) is RMSNorm and module.has_weight and not module.variance_size_override
    if not plain and type(module) is not GemmaRMSNorm:
        return None
    if envs.VLLM_BATCH_INVARIANT:
        return None
    if vllm_config.quant_config is not None and not quantized_norms.can_fuse(vllm_config):
        return None
    if versions.preferred_norm(vllm_config) != "native":
        return None
    if module.weight.dtype != vllm_config.model_config.dtype:
        return None
    return AddedNorm(module, module.variance_epsilon, plus_one=not plain)


def lm_head(
    vllm_config: Any,
    model: torch.nn.Module,
    sites: ModelSites,
    device: torch.device,
) -> LmHead | str | None:
    """The LM head as candidates need it, or why candidates cannot be projected on it.

    Whatever is found is compared with the model's own logits: an LM head that is not understood
    is never used.
    """
    if not is_last_stage() or vllm_config.model_config.runner_type != "generate":
        return None
    root = model.get_language_model() if hasattr(model, "get_language_model") else model
    processors = [m for m in root.modules() if isinstance(m, LogitsProcessor)]
    if len(processors) != 1:
        return f"the model has {len(processors)} logits processors; one was expected"
    candidates = [m for m in root.modules() if isinstance(m, VocabParallelEmbedding)]
    heads = [m for n, m in root.named_modules() if m in candidates and n.endswith("lm_head")]
    for module in [*heads, *candidates]:
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor):
            head = _head(module, weight.detach(), processors[0])
            if _agrees(vllm_config, root, head, sites.hidden_size, device):
                return head
    return (
        "the LM head is quantized or of a form that candidates cannot be projected on "
        f"({type(root).__name__})"
    )


def _head(module: Any, weight: torch.Tensor, processor: LogitsProcessor) -> LmHead:
    shards = module.shard_indices
    rows = shards.org_vocab_end_index - shards.org_vocab_start_index
    bias = getattr(module, "bias", None)
    parallel = get_tensor_model_parallel_world_size() > 1
    return LmHead(
        weight=weight[:rows],
        bias=None if bias is None else bias.detach()[:rows].float(),
        first_id=shards.org_vocab_start_index,
        scale=float(processor.scale),
        soft_cap=processor.soft_cap,
        reduce=tensor_model_parallel_all_reduce if parallel else None,
    )


class _NoAdapter:
    """What adds an adapter's part to logits, for rows that are of no request."""

    def add_lora_logits(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The logits as they are."""
        return logits


@contextmanager
def _without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Which rows an adapter is for is known of the last batch, or of none yet."""
    adapted = [m for m in model.modules() if isinstance(m, LogitsProcessorWithLoRA)]
    theirs = [module.punica_wrapper for module in adapted]
    try:
        for module in adapted:
            module.punica_wrapper = _NoAdapter()
        yield
    finally:
        for module, wrapper in zip(adapted, theirs, strict=True):
            module.punica_wrapper = wrapper


def _agrees(
    vllm_config: Any, model: Any, head: LmHead, hidden_size: int, device: torch.device
) -> bool:
    """Whether the head gives the logits that the model gives."""
    # Looked at first: the kernels of a CPU write into other memory where the widths differ, as in
    # an OPT whose LM head reads narrower rows than its blocks return.
    if head.weight.dim() != 2 or head.weight.shape[1] != hidden_size:
        return False
    dtype = vllm_config.model_config.dtype
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, hidden_size, generator=generator).to(device, dtype)
    with set_current_vllm_config(vllm_config), _without_adapters(model):
        logits = model.compute_logits(hidden)
    vocab = vllm_config.model_config.get_vocab_size()
    ids = torch.linspace(0, vocab - 1, 8).to(device, torch.int32).expand(2, 8).contiguous()
    rows = torch.arange(2, dtype=torch.int32, device=device)
    counts = torch.full((2,), 8, dtype=torch.int32, device=device)
    nothing = torch.zeros(2, 8, device=device)
    found = CandidateRows(rows, ids, nothing, counts, torch.zeros_like(counts))
    ours = head.raw_logits(hidden, rows, found)
    if logits is None:  # this rank does not gather logits
        return True
    theirs = logits.float().gather(1, ids.long())
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3))
