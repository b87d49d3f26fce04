"""What `SamplingParams` refuses of captures, by the name of the field."""

from __future__ import annotations

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
import vllm
from vllm.sampling_params import BeamSearchParams as VllmBeamSearchParams
from vllm.v1.engine import EngineCoreRequest

from tllm import PoolingParams, SamplingParams
from tllm.client.checked_params import CheckedParams
from tllm.engine.message_types import check_request
from tllm.params import asked_of

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


def test_options_of_consumers_are_plain_data():
    """An array, or a number of NumPy's, ends the engine on its way to a worker of its own."""
    options = {"beta": np.float32(0.5), "layers": np.arange(2), "row": torch.ones(2), "at": (1,)}
    params = SamplingParams(consumers={"mine": {**options, "positions": range(2)}})
    plain = {"beta": 0.5, "layers": [0, 1], "row": [1.0, 1.0], "at": [1], "positions": [0, 1]}
    found = params.asked.consumers["mine"]
    assert found == plain
    assert [*map(type, found.values())] == [*map(type, plain.values())]


def test_a_slice_of_layers_is_the_text_that_means_the_same():
    params = SamplingParams(
        capture={"memory": {"hooks": {"post_block": [0, slice(2, 4)], "mlp_out": slice(-2, None)}}},
        consumers={"lens": {"layers": slice(1, 3)}},
    )
    assert params.asked.consumers == {
        "memory": {"hooks": {"post_block": [0, "2:4"], "mlp_out": "-2:"}},
        "lens": {"layers": "1:3"},
    }
    with pytest.raises(ValueError, match=r"slice\(0, 4, 2\).*without a step"):
        SamplingParams(consumers={"lens": {"layers": slice(0, 4, 2)}})


@pytest.mark.parametrize(
    ("consumers", "says"),
    [
        ({"mine": {"judge": len}}, "consumers['mine']['judge'] is builtin_function_or_method"),
        ({"mine": {3: 1}}, "consumers['mine'] has the key 3; keys are text"),
        ({3: {}}, "consumers has the key 3; keys are text"),
        ({"mine": {"text": "\ud800"}}, "consumers['mine']['text']='\\ud800' has lone surrogates"),
    ],
)
def test_options_that_cannot_travel_are_refused_by_name(consumers, says):
    with pytest.raises(ValueError) as refused:
        SamplingParams(consumers=consumers)
    assert says in str(refused.value)


def test_tensors_are_plain_numbers_and_lists():
    positions = torch.tensor([4, -1])
    assert captured(positions=positions)["positions"] == [4, -1]
    assert captured(positions=list(positions))["positions"] == [4, -1]
    assert captured(hooks={"post_block": positions})["hooks"] == {"post_block": [4, -1]}
    assert captured(metadata={"loss": torch.tensor(0.5)})["metadata"] == {"loss": 0.5}


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (HOLDS_ITSELF, "nested deeper than 32 levels, or holds itself"),
        ({"deep": nested(5000)}, "['metadata']['deep']"),
        ({"text": b"bytes"}, "['metadata']['text'] is bytes"),
        ({"number": 1j}, "['metadata']['number'] is complex"),
        ({"thing": object()}, "['metadata']['thing'] is object"),
        ({"n": 2**64}, "['metadata']['n'] is beyond the 64 bits"),
        ({"n": [-(2**63) - 1]}, "['metadata']['n'][0] is beyond the 64 bits"),
        ({3: "key"}, "['metadata'] has the key 3; keys are text"),
    ],
)
def test_metadata_that_cannot_travel_is_refused_by_name(metadata, says):
    with pytest.raises(ValueError) as refused:
        captured(metadata=metadata)
    assert "capture['filesystem']['metadata']" in str(refused.value)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


HUGE = 2**64
ROW = [1.0, 2.0]
SET_TO_ZERO = {"hook": "post_block", "layer": 0, "positions": [0], "source": {"zero": True}}
PROBE = {"hook": "post_block", "layer": 0, "vector": ROW}


def steered(**entry):
    return {"steering_vectors": {"post_block": {0: {"vector": ROW, **entry}}}}


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        (
            {"steering_vectors": {"post_block": {HUGE: ROW}}},
            "steering_vectors['post_block']: the number of a layer",
        ),
        (
            {"steering_vectors": {"post_block": {0: [0.5, HUGE]}}},
            "steering_vectors['post_block'][0][1]",
        ),
        (steered(scale=HUGE), "steering_vectors['post_block'][0]['scale']"),
        (steered(positions={"image": [HUGE]}), "['positions']['image']"),
        (steered(positions={"image": 10**5000}), "['positions']['image']"),
        ({"steering_module_ref": ("calm", HUGE)}, "steering_module_ref[1]"),
        ({"patch": [SET_TO_ZERO | {"layer": HUGE}]}, "patch[0]: the number of a layer"),
        ({"patch": [SET_TO_ZERO | {"positions": [HUGE]}]}, "patch[0]['positions']"),
        ({"patch": [SET_TO_ZERO | {"alpha": HUGE}]}, "patch[0]['alpha']"),
        ({"patch": [SET_TO_ZERO | {"mask": [HUGE]}]}, "patch[0]['mask']"),
        (
            {"patch": [SET_TO_ZERO | {"source": {"tensor": [HUGE, 1]}}]},
            "patch[0]['source']['tensor'][0]",
        ),
        (
            {"stop_when": {"probe": PROBE | {"bias": HUGE}, "above": 0}},
            "stop_when['probe']['bias']",
        ),
        ({"stop_when": {"probe": PROBE, "between": [0, HUGE]}}, "stop_when['between'][1]"),
        (
            {"abort_when": {"probe": {"sae": "sae", "feature": HUGE}, "above": 0}},
            "abort_when['probe']['feature']",
        ),
        ({"capture": {"memory": {"positions": [HUGE]}}}, "capture['memory']['positions'][0]"),
    ],
)
def test_whole_numbers_that_no_message_holds_are_refused_by_place(asked, place):
    with pytest.raises(ValueError) as refused:
        SamplingParams(**asked)
    assert f"{place} is beyond the 64 bits that a whole number may have" in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        (
            {"steering_vectors": {"post_block": {0: [True, 0.5]}}},
            "steering_vectors['post_block'][0][0]",
        ),
        (
            {"steering_vectors": {"post_block": [[0.5, 1], [0.5, np.False_]]}},
            "steering_vectors['post_block'][1][1]",
        ),
        (
            {"steering_clamps": {"post_block": {0: {"vector": (2, True), "max": 1}}}},
            "steering_clamps['post_block'][0][1]",
        ),
        (
            {"patch": [SET_TO_ZERO | {"source": {"tensor": [[0.5], np.array([True])]}}]},
            "patch[0]['source']['tensor'][1][0]",
        ),
        ({"stop_when": {"probe": PROBE, "between": [False, 0.5]}}, "stop_when['between'][0]"),
        (
            {"stop_when": {"probe": PROBE | {"vector": [0.5, True]}, "above": 0}},
            "stop_when['probe']['vector'][1]",
        ),
    ],
)
def test_a_truth_value_among_numbers_is_refused_by_place(asked, place):
    """NumPy takes it for 1.0."""
    with pytest.raises(ValueError) as refused:
        SamplingParams(**asked)
    assert f"{place} is " in str(refused.value)
    assert "; give a number" in str(refused.value)


@pytest.mark.parametrize(
    "kind", [vllm.SamplingParams, lambda: VllmBeamSearchParams(beam_width=1, max_tokens=1)]
)
def test_what_is_set_on_vllms_parameters_is_refused(kind):
    """vLLM's structs take any attribute: the request was not steered, without a word."""
    params = kind()
    assert asked_of(params) == asked_of(None)
    params.steering_vectors = {"post_block": {1: [1.0]}}
    with pytest.raises(ValueError, match=r"steering_vectors was set on vLLM's .*; give .* to tllm"):
        asked_of(params)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (vllm.SamplingParams, "extra_args"),
        (vllm.PoolingParams, "extra_kwargs"),
        (SamplingParams, "extra_args"),
        (PoolingParams, "extra_kwargs"),
    ],
)
def test_what_is_asked_where_nobody_reads_it_is_refused(kind, place):
    for field in ("stop_when", "capture", "patch"):
        with pytest.raises(ValueError, match=rf"{place}\['{field}'\] was given.*give {field}="):
            asked_of(kind(**{place: {field: None}}))
    asked_of(kind(**{place: {"a_processor_of_the_users": 1}}))
    if kind in (SamplingParams, PoolingParams):
        with pytest.raises(ValueError, match=rf"{place}\['tllm'\] was given with tllm's class"):
            asked_of(kind(**{place: {"tllm": {"consumers": {}}}}))


@pytest.mark.parametrize("given", [{"max_tokens": 3}, 3, "x", SamplingParams])
def test_what_is_no_parameters_is_refused_with_what_is(given):
    with pytest.raises(TypeError, match=r"in the place of parameters.*give tllm\.SamplingParams"):
        asked_of(given)


# -- shared by threads -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        lambda params, **fields: msgspec.structs.replace(params, **fields),
        lambda params, **fields: SamplingParams(**{**msgspec.structs.asdict(params), **fields}),
    ],
)
def test_parameters_made_of_others_ask_what_their_own_fields_say(changed):
    params = SamplingParams(steering_vectors={"post_block": {1: [1.0, 2.0]}}, seed=1)
    [entry] = changed(params, steering_vectors={"post_block": {1: [3.0, 4.0]}}).asked.steering.own
    assert entry.vector.tolist() == [3.0, 4.0]
    assert changed(params, steering_vectors=None).asked.steering is None
    both = changed(params, stop_when="monitor")
    assert both.asked.steering.own
    assert both.asked.steering.endings
    for same in (changed(params, seed=2), pickle.loads(pickle.dumps(params)), params.clone()):
        assert [entry.vector.tolist() for entry in same.asked.steering.own] == [[1.0, 2.0]]
    assert changed(params, seed=2).asked is params.asked, "nothing is read twice"


def test_setting_one_field_reads_no_other_again():
    """What is changed inside a field that was given is not seen until that is given anew."""
    vector, excluded = np.ones(2, np.float32), iter([0])
    given = {"post_block": {1: vector}}
    where = {"exclude": {"positions": excluded}}
    params = SamplingParams(steering_vectors=given, steering_positions=where)
    vector *= np.nan
    changed = msgspec.structs.replace(params, stop_when="monitor")
    params.decode_steering_vectors = {"post_block": {2: [3.0, 4.0]}}
    for asked in (params.asked.steering, changed.asked.steering):
        assert next(iter(asked.own)).vector.tolist() == [1.0, 1.0]
        assert asked.positions.exclude.positions == (0,)
    vector[:] = 5
    params.steering_vectors = given
    assert [entry.vector.tolist() for entry in params.asked.steering.own] == [[5, 5], [3, 4]]


def test_what_is_refused_when_it_is_set_is_not_set():
    given = {"post_block": {1: [1.0, 2.0]}}
    params = SamplingParams(steering_vectors=given)
    with pytest.raises(ValueError, match="is 3; give a list of numbers"):
        params.steering_vectors = {"post_block": {1: 3}}
    assert params.steering_vectors is given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 2.5}, r"max_tokens=2.5: expected `int \| None`, got `float`"),
        ({"seed": 1.5, "max_tokens": 3}, "seed=1.5: expected"),
        ({"logit_bias": {3: "a"}}, "logit_bias={3: 'a'}: expected `float`, got `str`"),
        ({"allowed_token_ids": [1, 2.0]}, r"allowed_token_ids=\[1, 2.0\]: .* at \[1\]"),
        ({"seed": 2**64, "max_tokens": 2}, "seed is beyond the 64 bits"),
        ({"stop_token_ids": [-(2**70)]}, "stop_token_ids is beyond the 64 bits"),
    ],
)
def test_parameters_that_would_end_the_engines_reader_are_refused(given, message):
    copies = CheckedParams()
    copies.copy(SamplingParams(max_tokens=2, seed=1), {})
    for params in (SamplingParams(**given), vllm.SamplingParams(**given)):
        with pytest.raises(ValueError, match=message):
            copies.copy(params, {})
    for fine in ({"logit_bias": {3: 1}}, {"stop_token_ids": (3, 4)}, {"temperature": 1}):
        copies.copy(SamplingParams(**fine), {})


def test_requests_that_would_end_the_engines_reader_are_refused():
    def check(**given):
        fields = {"request_id": "a", "mm_features": None, "sampling_params": None}
        fields |= {"pooling_params": None, "arrival_time": 0.0, "lora_request": None}
        fields |= {"prompt_token_ids": [1, 2], "cache_salt": None, "data_parallel_rank": None}
        check_request(EngineCoreRequest(**fields | given))

    check(prompt_token_ids=None, trace_headers={"a": "b"}, priority=-3)
    check(prompt_token_ids=[np.int64(1)])  # an engine in this process takes it, and vLLM says so
    for given, message in (
        ({"prompt_token_ids": [1, 2.0]}, r"prompt_token_ids=\[1, 2.0\]: expected `int`, got"),
        ({"prompt_token_ids": [True]}, "got `bool`"),
        ({"priority": 1.5}, "priority=1.5: expected `int`, got `float`"),
        ({"cache_salt": 5}, "cache_salt=5: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            check(**given)


def test_threads_that_share_parameters_ask_the_same_and_change_nothing():
    shared = SamplingParams(
        temperature=0.8,
        seed=7,
        stop=["the end"],
        logit_bias={3: 1.0},
        steering_vectors={"post_block": {1: {"vector": np.arange(8.0), "scale": 2.0}}},
        decode_steering_vectors={"pre_attn": {0: [0.5] * 8}},
        patch=[{"hook": "mlp_out", "layer": 0, "positions": [1], "source": {"zero": True}}],
        capture={"memory": {"hooks": {"post_block": [0, 2]}, "positions": [0, -1]}},
        consumers={"probe": {"enabled": True, "names": ["a", "b"]}},
    )
    before = copy.deepcopy(shared)
    copies = CheckedParams()  # one front end's, whatever thread adds the request

    def asked_by(number):
        asked = asked_of(shared)
        digests = [group.digest for group in asked.steering.groups]
        wire = {"consumers": asked.consumers, "groups": digests}
        own = copies.copy(shared, wire)
        assert own is not shared
        assert own.stop is not shared.stop
        own.stop.append(f"of request {number}")  # a copy is its request's own
        own.logit_bias[number] = -1.0
        return repr((wire, own.extra_args, own.temperature, own.seed, own.stop[:-1]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = set(threads.map(asked_by, range(400)))
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 1
    assert shared == before
    assert (shared.stop, shared.logit_bias) == (["the end"], {3: 1.0})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("steering_vector", "steering_vectors"),
        ("steering_vectrs", "steering_vectors"),
        ("capture_", "capture"),
        ("captrue", "capture"),
        ("steering_name", "steering_module_ref"),
        ("steering_scale", "steering_vectors, "),
    ],
)
def test_a_field_that_is_set_under_a_misspelt_name_is_refused(name, meant):
    """vLLM's structs take any attribute; the request would run without what was asked."""
    for params in (SamplingParams(), PoolingParams()):
        with pytest.raises(AttributeError, match=f"no field '{name}'.*{meant}"):
            setattr(params, name, {})


def test_attributes_that_are_not_like_ours_may_be_set():
    params = SamplingParams()
    for name in ("path", "matched", "stopped", "conversations_id", "_seen", "min_tokens"):
        setattr(params, name, 3)
    assert copy.deepcopy(params) == params
