"""Values of tokens on the host, by sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tllm.consumers.lens import LensConsumer
from tllm.consumers.probe import ProbeConsumer
from tllm.consumers.token_rows import TokenRows
from tllm.ports import RequestInfo, RowMeta


def request(prompt: str, slot: int, sample: int = 0) -> RequestInfo:
    return RequestInfo(prompt, prompt, sample, 1, slot, 2)


def meta(requests: list[RequestInfo], index: list[int], positions: list[int]) -> RowMeta:
    numbers = [np.array(each, np.int32) for each in (index, positions)]
    return RowMeta(tuple(requests), *numbers, np.zeros(len(index), np.int64))


def values(*given: float) -> dict[str, np.ndarray]:
    return {"values": np.array(given, np.float32)}


def test_a_sequence_is_never_given_what_another_had_in_its_slot() -> None:
    """One has ended and was not taken yet when the next begins in its slot, and ends first."""
    rows, first, second = TokenRows(), request("first", 3), request("second", 3)
    rows.begin(first)
    rows.add(meta([first], [0, 0], [0, 1]), values(1, 2))
    rows.begin(second)
    assert rows.so_far({"second": {0: 0}}) == {}
    assert rows.take(second) is None
    taken = rows.take(first)
    assert taken is not None and taken["values"].values.tolist() == [1, 2]
    assert rows.take(first) is None


def test_bundles_are_sorted_by_sequence_whatever_their_order_and_shape() -> None:
    rows = TokenRows()
    one, other, wide = request("one", 0), request("other", 1), request("wide", 2, sample=1)
    for each in (one, other, wide):
        rows.begin(each)
    rows.add(meta([other, one], [0, 1, 1], [5, 0, 1]), values(50, 0, 1))
    rows.add(meta([wide], [0], [7]), {"values": np.array([[1, 2, 3]], np.float32)})
    rows.add(meta([one, other], [0, 1], [2, 6]), values(2, 60))
    new = rows.so_far({"one": {0: 1}, "wide": {1: 0}, "other": {1: 0}})
    assert set(new) == {"one", "wide"}
    assert new["one"][0][1]["values"].positions.tolist() == [1, 2]
    for each, positions, found in (
        (one, [0, 1, 2], [0, 1, 2]),
        (other, [5, 6], [50, 60]),
        (wide, [7], [[1, 2, 3]]),
    ):
        taken = rows.take(each)
        assert taken is not None
        assert taken["values"].positions.tolist() == positions
        assert taken["values"].values.tolist() == found
    assert rows.so_far({"one": {0: 0}}) == {}


def test_of_two_rows_of_a_position_the_later_counts_whatever_its_shape() -> None:
    """Values are as wide as the widest request of a step, and a streamed prompt drops tokens."""
    rows, one, wide = TokenRows(), request("one", 0), request("wide", 1)

    def add(position: int, *given: float) -> None:
        both = [one] if len(given) == 1 else [one, wide]
        index = list(range(len(both)))
        row = {"values": np.array([given] * len(both), np.float32)}
        rows.add(meta(both, index, [position] * len(both)), row)

    add(0, 1)
    add(1, 2, 0)  # of a token that is dropped then
    add(1, 3)
    taken = rows.take(one, 1)
    assert taken is not None and taken["values"].values.tolist() == [[1], [3]]


@pytest.mark.parametrize(
    "given", ["x", None, ["p"], {"p": 3}, {3: {0: 0}}, {"p": {"0": 1}}, {"p": {0: 1.5}}]
)
def test_consumers_refuse_to_be_asked_for_what_is_no_position(given: Any) -> None:
    """In the user's process: what raises in the workers detaches the consumer for all."""
    for consumer in (ProbeConsumer([1.0]), LensConsumer([0])):
        with pytest.raises(ValueError, match=r"so_far was given .*; give the first position"):
            consumer.validate_call("so_far", (given,))
        consumer.validate_call("so_far", ({"p": {0: np.int64(3), 1: 0}},))
        consumer.validate_call("so_far", ({},))
