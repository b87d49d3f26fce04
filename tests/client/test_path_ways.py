"""Ways of a change that are refused for the model's sake; what they give is in `tests/engine`."""

import pytest

from tllm.client.path_ways import PathWays
from tllm.spec.hooks import ModelPoints


def test_branches_cannot_be_frozen_where_a_model_carries_several_streams():
    points = ModelPoints("gemma3n", 2, {}, one_stream=False)
    with pytest.raises(ValueError, match=r"gemma3n carries several residual streams.*leave it out"):
        PathWays.parse(points, "all", ())
    ways = PathWays.parse(points, (), [("mlp_in", 1)])
    assert ways is not None and not ways.freeze
