"""Engines that schedule a step ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from vllm.platforms.cpu import CpuPlatform


@contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Engines that are made meanwhile do as vLLM does on GPUs; it turns that off for a CPU although
    it works there."""
    settle = CpuPlatform.check_and_update_config

    @staticmethod
    def settle_and_schedule_ahead(vllm_config):
        settle(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", settle_and_schedule_ahead)
        yield
