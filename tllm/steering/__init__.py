"""Steering vectors: read from files that people have, or made from prompts; and how strongly."""

from tllm.steering.extraction import extract
from tllm.steering.features import steer_features
from tllm.steering.files import load
from tllm.steering.formats.by_module import load_act, load_angular
from tllm.steering.formats.reft import load_reft
from tllm.steering.module import ExtractedModule, SteeringModule
from tllm.steering.probing import FittedProbe, fit_probe
from tllm.steering.strength_sweep import StrengthSweep, sweep

__all__ = [
    "ExtractedModule",
    "FittedProbe",
    "SteeringModule",
    "StrengthSweep",
    "extract",
    "fit_probe",
    "load",
    "load_act",
    "load_angular",
    "load_reft",
    "steer_features",
    "sweep",
]
