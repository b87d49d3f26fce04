"""The order of prediction and training, which run on two streams."""

from __future__ import annotations

import torch

from tllm.cuda_runtime import current_stream


class Fence:
    """Keeps readers and writers of the weights apart, on the device only.

    Prediction runs on the compute stream, training on the side stream. What is handed out on the
    side stream is ordered behind the compute stream, so that training cannot disturb a prediction;
    that a prediction sees the training before it is seen to here. On a CPU everything is in order
    already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trained = torch.cuda.Event() if device.type == "cuda" else None

    def wait_for_training(self) -> None:
        """What the current stream does next sees the last training step."""
        if self._trained is not None:
            self._trained.wait(current_stream(self._device))

    def trained(self) -> None:
        """The current stream's work so far includes a training step."""
        if self._trained is not None:
            self._trained.record(current_stream(self._device))

    def synchronize(self) -> None:
        """Make the host wait for both."""
        if self._trained is not None:
            torch.cuda.synchronize(self._device)
