"""The order of prediction and training, which run on two streams."""

from __future__ import annotations

import torch


class Fence:
    """Keeps readers and writers of the weights apart, on the device only.

    Prediction runs on the compute stream, training on a side stream; each waits for the other's
    latest work. On a CPU everything is in order already.
    """

    def __init__(self, device: torch.device) -> None:
        self._predicted = _event(device)
        self._trained = _event(device)

    def wait_for_training(self) -> None:
        """What the current stream does next sees the last training step."""
        if self._trained is not None:
            self._trained.wait()

    def wait_for_prediction(self) -> None:
        """What the current stream does next cannot disturb the last prediction."""
        if self._predicted is not None:
            self._predicted.wait()

    def predicted(self) -> None:
        """The current stream's work so far includes a prediction."""
        if self._predicted is not None:
            self._predicted.record()

    def trained(self) -> None:
        """The current stream's work so far includes a training step."""
        if self._trained is not None:
            self._trained.record()

    def synchronize(self) -> None:
        """Make the host wait for both."""
        for event in (self._predicted, self._trained):
            if event is not None:
                event.synchronize()


def _event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Event()
