"""Steering vectors: read from files that people have, or made from prompts."""

from tllm.steering.extraction import extract
from tllm.steering.features import steer_features
from tllm.steering.files import load
from tllm.steering.formats.reft import load_reft
from tllm.steering.module import ExtractedModule, SteeringModule

__all__ = ["ExtractedModule", "SteeringModule", "extract", "load", "load_reft", "steer_features"]
