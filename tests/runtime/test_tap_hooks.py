"""When hooks call their taps; what they give is compared in `tests/oracle`."""

import torch

from tllm.models.sites import Site
from tllm.runtime.tap_hooks import add_hook, unless
from tllm.spec.hooks import HookPoint


def hooked(resting):
    """A module that doubles its input, and whose output is counted up by a hook."""
    module = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    torch.nn.init.constant_(module.weight, 2.0)
    site = Site(HookPoint.POST_BLOCK, 0, module, "output", 0)
    add_hook(site, unless(resting, 0, lambda module, args, kwargs, output: output + 1))
    return module


def test_a_tap_that_rests_is_not_called():
    resting = [True]
    module = hooked(resting)
    assert module(torch.ones(1)) == 2
    resting[0] = False
    assert module(torch.ones(1)) == 3


def test_in_a_graph_every_tap_is_called():
    resting = [True]
    compiled = torch.compile(hooked(resting), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)) == 3
    resting[0] = False
    assert compiled(torch.ones(1)) == 3
