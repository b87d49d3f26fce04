"""vLLM's engine arguments, for editors and type checkers: those of vLLM 0.32.

Written by `python tests/client/vllm_arguments.py`. What has a type of vLLM's own is `Any` here.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class VllmArguments(TypedDict, total=False):
    """The fields of `vllm.EngineArgs`, but for the model."""

    # fmt: off
    enable_return_routed_experts: bool
    return_sampling_mask: bool
    model_weights: str
    served_model_name: str | list[str] | None
    tokenizer: str | None
    hf_config_path: str | None
    runner: Literal["auto", "generate", "pooling", "draft"]
    convert: Literal["auto", "none", "embed", "classify"]
    skip_tokenizer_init: bool
    enable_prompt_embeds: bool
    tokenizer_mode: (Literal["auto", "hf", "mistral", "deepseek_v32", "deepseek_v4", "inkling",
        "kimi_k3", "cohere"] | str)
    trust_remote_code: bool
    allowed_local_media_path: str
    allowed_media_domains: list[str] | None
    download_dir: str | None
    safetensors_load_strategy: Literal["lazy", "eager", "prefetch", "torchao"] | None
    safetensors_prefetch_num_threads: int
    safetensors_prefetch_block_size: int
    load_format: str
    config_format: str
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
    kv_cache_dtype: (Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
        "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc",
        "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head",
        "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6"])
    seed: int
    max_model_len: int
    cudagraph_capture_sizes: list[int] | None
    max_cudagraph_capture_size: int | None
    ir_op_priority: Any
    distributed_executor_backend: Any
    pipeline_parallel_size: int
    master_addr: str
    master_port: int
    nnodes: int
    node_rank: int
    distributed_timeout_seconds: int | None
    cpu_distributed_timeout_seconds: int | None
    numa_bind: bool
    numa_bind_nodes: list[int] | None
    numa_bind_cpus: list[str] | None
    device_ids: list[int | str] | None
    tensor_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    dcp_comm_backend: Literal["ag_rs", "a2a"] | None
    dcp_q_replicate: bool | None
    dcp_kv_cache_interleave_size: int
    cp_kv_cache_interleave_size: int | None
    data_parallel_size: int
    data_parallel_rank: int | None
    data_parallel_start_rank: int | None
    data_parallel_size_local: int | None
    data_parallel_address: str | None
    data_parallel_rpc_port: int | None
    data_parallel_hybrid_lb: bool
    data_parallel_external_lb: bool
    data_parallel_multi_port_external_lb: bool
    data_parallel_backend: Literal["ray", "mp"]
    enable_hc_sp: bool
    enable_expert_parallel: bool
    enable_batch_sharded_sampling: bool | None
    enable_ep_weight_filter: bool
    moe_backend: (Literal["auto", "triton", "batched_triton", "deep_gemm", "deep_gemm_mega_moe",
        "cutlass", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl",
        "flashinfer_moe_ep_cutedsl", "flashinfer_b12x", "b12x", "flashinfer_moe_ep_mega_deep_gemm",
        "marlin", "humming", "triton_unfused", "aiter", "aiter_mega_moe", "aiter_triton_mxfp4_bf16",
        "flydsl", "hpc", "emulation", "rdna3"])
    linear_backend: (Literal["auto", "cutlass", "flashinfer_cutlass", "flashinfer_cutedsl",
        "flashinfer_trtllm", "flashinfer_cudnn", "flashinfer_b12x", "b12x", "marlin", "humming",
        "triton", "deep_gemm", "torch", "aiter", "machete", "fbgemm", "conch", "exllama",
        "emulation", "xpu", "xpu_woq"])
    sparse_indexer_topk_backend: (Literal["auto", "deep_select", "cooperative", "persistent",
        "per_row", "flashinfer", "torch", "aiter"])
    all2all_backend: (Literal["naive", "pplx", "deepep_high_throughput", "deepep_low_latency",
        "deepep_v2", "mori_high_throughput", "mori_low_latency", "moonep", "nixl_ep",
        "allgather_reducescatter", "flashinfer_all2allv", "flashinfer_nvlink_two_sided",
        "flashinfer_nvlink_one_sided", "passthrough"])
    enable_elastic_ep: bool
    elastic_ep_max_dp_size: int
    enable_dbo: bool
    ubatch_size: int
    dbo_decode_token_threshold: int
    dp_sync_interval: int
    dbo_prefill_token_threshold: int
    disable_nccl_for_dp_synchronization: bool | None
    eplb_config: Any
    enable_eplb: bool
    expert_placement_strategy: Literal["linear", "round_robin"]
    _api_process_count: int
    _api_process_rank: int
    max_parallel_loading_workers: int | None
    block_size: int | None
    enable_prefix_caching: bool | None
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
    prefix_cache_retention_interval: int | None
    disable_sliding_window: bool
    disable_cascade_attn: bool | None
    offload_backend: str
    cpu_offload_gb: float
    cpu_offload_params: set[str]
    offload_group_size: int
    offload_num_in_group: int
    offload_prefetch_step: int
    offload_params: set[str]
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    max_num_batched_tokens: int | None
    max_num_scheduled_tokens: int | None
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    max_num_seqs: int | None
    max_num_active_seqs: int | None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    max_logprobs: int
    logprobs_mode: Literal["raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"]
    use_fp64_gumbel: bool
    enable_trace_replay: bool
    disable_log_stats: bool
    aggregate_engine_logging: bool
    revision: str | None
    code_revision: str | None
    hf_token: bool | str | None
    hf_overrides: Any
    model_class_overrides: dict[str, str]
    tokenizer_revision: str | None
    quantization: str | None
    quantization_config: Any
    allow_deprecated_quantization: bool
    enforce_eager: bool
    disable_custom_all_reduce: bool
    enable_shm_tensor_arena: bool
    language_model_only: bool
    limit_mm_per_prompt: dict[str, int | dict[str, int]]
    enable_mm_embeds: bool
    interleave_mm_strings: bool
    media_io_kwargs: dict[str, dict[str, Any]]
    mm_processor_kwargs: dict[str, Any] | None
    mm_processor_cache_gb: float
    mm_processor_cache_type: Literal["shm", "lru"] | None
    mm_hasher_algorithm: Literal["blake3", "sha256", "sha512"]
    mm_shm_cache_max_object_size_mb: int
    mm_encoder_only: bool
    mm_encoder_tp_mode: Literal["weights", "data"]
    mm_encoder_attn_backend: Any
    mm_encoder_attn_dtype: str | None
    mm_encoder_fp8_scale_path: str | None
    mm_encoder_fp8_scale_save_path: str | None
    mm_encoder_fp8_scale_save_margin: float
    io_processor_plugin: str | None
    renderer_num_workers: int
    skip_mm_profiling: bool
    video_pruning_rate: float | None
    video_pruning_method: str
    mm_tensor_ipc: Literal["direct_rpc", "torch_shm"]
    mm_processor_device: str
    mm_ipc_gpu_memory_gb: float
    mm_device_do_normalize: bool | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
    default_mm_loras: dict[str, str] | None
    fully_sharded_loras: bool
    max_cpu_loras: int | None
    lora_dtype: Any
    lora_target_modules: list[str] | None
    enable_tower_connector_lora: bool
    specialize_active_lora: bool
    enable_mixed_moe_lora_format: bool
    enable_moe_shared_loras: bool
    max_lora_cls_labels: int | None
    ray_workers_use_nsight: bool
    num_gpu_blocks_override: int | None
    model_loader_extra_config: Any
    ignore_patterns: str | list[str]
    enable_chunked_prefill: bool | None
    disable_chunked_mm_input: bool
    scheduler_reserve_full_isl: bool
    prefill_schedule_interval: int
    watermark: float
    disable_hybrid_kv_cache_manager: bool | None
    structured_outputs_config: Any
    aux_output_config: Any
    reasoning_parser: str
    reasoning_parser_plugin: str | None
    speculative_config: dict[str, Any] | None
    spec_method: str | None
    spec_model: str | None
    spec_tokens: int | None
    watermark_config: dict[str, Any] | None
    diffusion_config: dict[str, Any] | None
    show_hidden_metrics_for_version: str | None
    otlp_traces_endpoint: str | None
    collect_detailed_traces: list[Literal["model", "worker", "all"]] | None
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"]
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    custom_histogram_buckets: dict[str, list[float]] | None
    cudagraph_metrics: bool
    enable_layerwise_nvtx_tracing: bool
    enable_mfu_metrics: bool
    enable_logging_iteration_details: bool
    jit_monitor_mode: Literal["warn", "error"]
    jit_monitor_verbose: bool
    enable_mm_processor_stats: bool
    scheduling_policy: Literal["fcfs", "priority"]
    scheduler_cls: Any
    pooler_config: Any
    compilation_config: Any
    attention_config: Any
    engram_config: Any
    mamba_config: Any
    kernel_config: Any
    enable_flashinfer_autotune: bool
    worker_cls: str
    worker_extension_cls: str
    profiler_config: Any
    logging_config: Any
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"] | None
    log_config_file: str | None
    kv_transfer_config: Any
    kv_events_config: Any
    ec_transfer_config: Any
    ec_manager_config: Any
    reasoning_config: Any
    generation_config: str
    enable_sleep_mode: bool
    sleep_mode_offload_cudagraph: bool
    sleep_preserve_parameter_names: list[str]
    enable_cumem_allocator: bool
    enable_nccl_comm_suspend: bool
    override_generation_config: dict[str, Any]
    model_impl: str
    attention_backend: Any
    kv_cache_dtype_skip_layers: list[str]
    mamba_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"]
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"]
    mamba_block_size: int | None
    prefix_match_unit: int | None
    mamba_cache_mode: Literal["align", "none"]
    enable_mamba_shared_prefix_checkpoint: bool
    replayssm_buffer_len: int
    use_replayssm: bool
    mamba_backend: Any
    mamba_ssu_algorithm: Literal["auto", "simple", "vertical", "horizontal"] | None
    enable_mamba_cache_stochastic_rounding: bool
    mamba_cache_philox_rounds: int
    additional_config: dict[str, Any]
    use_tqdm_on_load: bool
    pt_load_map_location: str | dict[str, str]
    logits_processors: list[Any] | None
    async_scheduling: bool | None
    stream_interval: int
    kv_sharing_fast_prefill: bool
    swa_bounded_replay: bool
    optimization_level: Any
    performance_mode: Literal["balanced", "interactivity", "throughput"]
    fault_tolerance_config: Any
    enable_fault_tolerance: bool
    kv_offloading_size: float | None
    kv_offloading_backend: Literal["native", "lmcache"]
    tokens_only: bool
    shutdown_timeout: int
    weight_transfer_config: Any
    fail_on_environ_validation: bool
    gdn_prefill_backend: Literal["flashinfer", "triton", "cutedsl", "aiter_flydsl"] | None
    kda_prefill_backend: Literal["auto", "triton", "flashkda", "flashinfer", "fused"] | None
    kda_decode_backend: Literal["auto", "native", "flashinfer", "triton"] | None
