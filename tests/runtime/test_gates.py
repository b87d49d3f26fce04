"""Conditions in a worker's tables: what is refused, and that nothing is left."""

import numpy as np
import pytest
import torch

from tllm.runtime.columns import FLAG_BITS, Column
from tllm.runtime.descriptor import Descriptor
from tllm.runtime.kernels import tap
from tllm.runtime.steering import Steering
from tllm.runtime.taps import Taps
from tllm.spec.groups import compose
from tllm.spec.hooks import HookPoint
from tllm.spec.tiers import Tiers

HIDDEN = 8
HERE = [(HookPoint.POST_BLOCK, 1), (HookPoint.POST_BLOCK, 2)]


@pytest.fixture
def taps():
    """A pipeline stage that has the second layer and the third."""
    return Taps(
        dict.fromkeys(HERE),
        second={},
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_tokens=4,
        max_programs=4,
        add_rows=4,
    )


@pytest.fixture
def steering(taps):
    return Steering(taps, lambda hook, layer: (HookPoint(hook), layer), 2, 16, 64)


def entry(layer, above=0.5):
    probe = {"hook": "post_block", "layer": layer, "vector": np.ones(HIDDEN)}
    return {"vector": np.ones(HIDDEN), "when": {"probe": probe, "above": above}}


def put(steering, layers):
    """Let a worker hold one group; its digest."""
    (group,) = compose([Tiers.parse(vectors={"post_block": layers})])
    steering.put(group.vectors, {group.digest: group.operations}, {group.digest: group.gates})
    return group.digest


@pytest.mark.parametrize("layers", [{1: entry(2)}, {2: entry(3)}])
def test_a_probe_of_a_later_layer_or_pipeline_stage_is_refused(steering, layers):
    with pytest.raises(ValueError, match="later in the network, or on a later pipeline stage"):
        put(steering, layers)


@pytest.mark.parametrize(
    ("layers", "crossings"),
    [
        ({1: entry(0)}, (False, True)),
        ({3: entry(1)}, (True, False)),
        ({2: entry(0), 3: entry(2)}, (True, True)),
        ({2: entry(1)}, (False, False)),
        ({0: entry(0), 4: entry(3)}, (False, False)),
    ],
)
def test_a_stage_knows_what_it_tells_and_hears(steering, layers, crossings):
    assert steering.crossings([put(steering, layers)]) == crossings


def test_what_another_stage_does_and_judges_is_its_own(steering):
    put(steering, {0: entry(0), 1: entry(1)})


def flags(taps):
    return [int(word) & 2**FLAG_BITS - 1 for word in taps.descriptors[:, Descriptor.FLAGS]]


def test_taps_look_at_conditions_while_a_sequence_has_any_and_rows_are_used_again(taps, steering):
    """More conditions than there are rows, one after the other; of few vectors, none is left."""
    gated = Column.GATE.flag
    for number in range(9):
        digest = put(steering, {2: entry(1, above=number)})
        row = steering.acquire((digest,))
        steering.commit()
        taps.commit()
        assert [each & gated for each in flags(taps)] == [gated, 0]
        taps.plan[Column.STEER.plan_row] = row
        rows = torch.arange(4.0)[:, None].expand(-1, HIDDEN) * number / 16
        scores = rows.sum(1)
        for i, expected in enumerate([rows, rows + (rows.sum(1, keepdim=True) > number)]):
            rows = rows.clone()
            tap.reference(rows, None, taps.descriptors[i], taps.plan)
            assert torch.equal(rows, expected)
            assert torch.equal(steering.gates.state[:, 1, 0], scores)
        steering.release((digest,))
        steering.commit()
        taps.commit()
        assert [each & gated for each in flags(taps)] == [0, 0]
        steering.drop([digest], list(vectors_of(steering)))
    assert not steering.gates._vectors


def vectors_of(steering):
    return [*steering.gates._vectors, *steering._vectors.rows]


def test_nothing_is_kept_of_vectors_that_nobody_has_any_more(steering):
    for number in range(20):
        (group,) = compose(
            [Tiers.parse(vectors={"post_block": {1: np.full(HIDDEN, number + 1.0)}})]
        )
        steering.put(group.vectors, {group.digest: group.operations}, {group.digest: group.gates})
        steering.acquire((group.digest,))
        steering.release((group.digest,))
        steering.drop([group.digest], group.vectors)
    assert not steering._vectors.rows
    assert not steering._vectors._users
    assert not steering._vectors._dropped
