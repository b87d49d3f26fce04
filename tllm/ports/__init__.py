"""The catalogue: what a consumer may read and write."""

from tllm.ports.actions import Action, ActionLog, Actions, Note, SetScale, Steer, Stop, TakenAction
from tllm.ports.base import ConsumerFlow, Place, PortRead, PortWrite, Window
from tllm.ports.bundle import ConsumerContext, HostTensor, ModelView, PortBundle, ResidualWriter
from tllm.ports.declared import CpuExport, Logits, ResidualStream, Signals, TokenTarget
from tllm.ports.payload import Payload, PerToken, RequestResult, in_order
from tllm.ports.request_meta import RequestInfo, RequestMeta, RowMeta
from tllm.ports.sampler import Candidates, Sampler
from tllm.spec.phases import Phase

__all__ = [
    "Action",
    "ActionLog",
    "Actions",
    "Candidates",
    "ConsumerContext",
    "ConsumerFlow",
    "CpuExport",
    "HostTensor",
    "Logits",
    "ModelView",
    "Note",
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
    "RowMeta",
    "Sampler",
    "SetScale",
    "Signals",
    "Steer",
    "Stop",
    "TakenAction",
    "TokenTarget",
    "Window",
    "in_order",
]
