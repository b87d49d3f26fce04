"""Sweeps of activation patching: what they measure, and what comes of them."""

from tllm.patching.metrics import METRICS as METRICS
from tllm.patching.sweep import Sweep as Sweep
