"""Inference mode is on in what is decorated, whoever calls it, and left as it was."""

from __future__ import annotations

import pytest
import torch

from tllm.inference_mode import in_inference_mode


@in_inference_mode
def made(fails: bool = False) -> torch.Tensor:
    """Zeros that say in which mode they were made."""
    if fails:
        raise ValueError("asked to")
    return torch.zeros(1)


def test_it_is_entered_where_it_is_not_on() -> None:
    assert made().is_inference()
    assert not torch.is_inference_mode_enabled()
    with pytest.raises(ValueError, match="asked to"):
        made(fails=True)
    assert not torch.is_inference_mode_enabled()


def test_it_stays_on_where_it_was() -> None:
    with torch.inference_mode():
        assert made().is_inference()
        assert torch.is_inference_mode_enabled()
    with torch.inference_mode(False):
        assert made().is_inference()
        assert not torch.is_inference_mode_enabled()


def test_the_function_keeps_its_name_and_documentation() -> None:
    assert made.__name__ == "made"
    assert made.__doc__ == "Zeros that say in which mode they were made."
