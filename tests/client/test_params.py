"""What `SamplingParams` refuses of captures, by the name of the field."""

from __future__ import annotations

import numpy as np
import pytest

from tllm import SamplingParams

HOLDS_ITSELF: dict = {}
HOLDS_ITSELF["again"] = [HOLDS_ITSELF]


def nested(levels):
    made = []
    for _ in range(levels):
        made = [made]
    return made


def captured(**options):
    params = SamplingParams(capture={"filesystem": {"hooks": "post_block:0", **options}})
    return params.asked.consumers["filesystem"]


def test_numbers_of_numpy_are_plain_numbers():
    given = {"whole": np.int64(3), "real": np.float32(0.5), "one": np.array(7), "flag": np.True_}
    plain = {"whole": 3, "real": 0.5, "one": 7, "flag": True}
    assert captured(metadata=given)["metadata"] == plain
    assert captured(positions=np.arange(3))["positions"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (HOLDS_ITSELF, "nested deeper than 32 levels, or holds itself"),
        ({"deep": nested(5000)}, "['metadata']['deep']"),
        ({"text": b"bytes"}, "['metadata']['text'] is bytes"),
        ({"number": 1j}, "['metadata']['number'] is complex"),
        ({"thing": object()}, "['metadata']['thing'] is object"),
        ({3: "key"}, "['metadata'] has the key 3; keys are text"),
    ],
)
def test_metadata_that_cannot_travel_is_refused_by_name(metadata, says):
    with pytest.raises(ValueError) as refused:
        captured(metadata=metadata)
    assert "capture['filesystem']['metadata']" in str(refused.value)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300
