"""The catalogue: what a consumer may read and write."""

from tllm.ports.base import ConsumerFlow, Phase, Place, PortRead, PortWrite, Window
from tllm.ports.bundle import ConsumerContext, ModelView, PortBundle, ResidualWriter
from tllm.ports.cpu_export import CpuExport
from tllm.ports.logits import Logits
from tllm.ports.request_meta import (
    Payload,
    PerToken,
    RequestInfo,
    RequestMeta,
    RequestResult,
    RowMeta,
    in_order,
)
from tllm.ports.residual_stream import ResidualStream
from tllm.ports.result_memory import ResultMemory
from tllm.ports.sampler import Candidates, Sampler
from tllm.ports.token_target import TokenTarget

__all__ = [
    "Candidates",
    "ConsumerContext",
    "ConsumerFlow",
    "CpuExport",
    "Logits",
    "ModelView",
    "Payload",
    "PerToken",
    "Phase",
    "Place",
    "PortBundle",
    "PortRead",
    "PortWrite",
    "RequestInfo",
    "RequestMeta",
    "RequestResult",
    "ResidualStream",
    "ResidualWriter",
    "ResultMemory",
    "RowMeta",
    "Sampler",
    "TokenTarget",
    "Window",
    "in_order",
]
