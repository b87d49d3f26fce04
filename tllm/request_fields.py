"""The fields of a request's body that are tLLM's. It imports nothing: who only sends requests needs
neither vLLM nor torch."""

FIELDS = (
    "consumers",
    "capture",
    "steering_vectors",
    "prefill_steering_vectors",
    "decode_steering_vectors",
    "steering_clamps",
    "prefill_steering_clamps",
    "decode_steering_clamps",
    "steering_module_ref",
    "steering_name",
    "steering_positions",
    "patch",
    "stop_when",
    "abort_when",
    "conversation",
)
"""As arguments of `tllm.SamplingParams`; `steering_name` is another name of
`steering_module_ref`."""
