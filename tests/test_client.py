"""A request's own copy of the parameters, and how what it asks travels."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import vllm
from vllm.outputs import CompletionOutput, RequestOutput

from tllm import PoolingParams, SamplingParams
from tllm.client import checked_params
from tllm.client.attached import Client
from tllm.consumers.base import Consumer
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.consumers.lens import LensConsumer
from tllm.engine.refusals import RefusedError
from tllm.spec.conversations import ConversationUse
from tllm.spec.groups import GroupUse
from tllm.spec.media import MediaItem
from tllm.spec.patching import PatchUse
from tllm.spec.request import EXTRA_ARG, RequestSpec, RowsRead
from tllm.spec.selection import Selection

STOPS = {"stop": ["a", "b"], "stop_token_ids": [3, 4]}


def a_client(*consumers):
    """A client that knows what is registered."""
    client = Client()
    client.registered._attached = True
    for consumer in consumers:
        client.registered._adopt(consumer, False, "")
    return client


def prepare(client, params):
    """What the engine gets; nothing has to be asked of the workers."""
    with pytest.raises(StopIteration) as done:
        next(client.admission.admit(params, "id"))
    return done.value.value.params


def prepared(params):
    return prepare(a_client(), params)


@pytest.mark.parametrize("asked", [{}, STOPS, {"logit_bias": {5: 1.0}}, {"extra_args": {"x": [1]}}])
def test_what_vllm_does_to_its_copy_leaves_the_users_parameters_alone(asked):
    given = vllm.SamplingParams(temperature=0.8, **asked)
    before = copy.deepcopy(given)
    copied = prepared(given).clone()
    copied.update_from_generation_config({"eos_token_id": [7, 8]}, 9)
    copied.stop.append("more")
    if asked.get("logit_bias"):
        copied.logit_bias[6] = 2.0
    if asked.get("extra_args"):
        copied.extra_args["x"].append(2)
    assert given == before


def test_vllm_is_told_that_it_has_a_copy_unless_there_are_fields_that_are_not_known():
    for asked in (STOPS, {"logit_bias": {5: 1.0}}, {"extra_args": {"x": [1]}}):
        assert prepared(vllm.SamplingParams(**asked)).skip_clone
    assert not prepared(type("Own", (vllm.SamplingParams,), {})()).skip_clone


VECTORS = {"post_block": {1: [1.0, 2.0]}}


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda p: p.clone(),
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: SamplingParams.from_optional(
            temperature=p.temperature, stop=p.stop, steering_vectors=p.steering_vectors
        ),
    ],
)
def test_copies_of_parameters_ask_the_same(copied):
    given = SamplingParams(temperature=0.5, stop=["a"], steering_vectors=VECTORS)
    own = copied(given)
    assert isinstance(own, SamplingParams) and isinstance(own, vllm.SamplingParams)
    assert (own.temperature, own.stop) == (0.5, ["a"])
    digests = [group.digest for group in own.asked.steering.groups]
    assert digests == [group.digest for group in given.asked.steering.groups]
    own.stop.append("b")
    own.steering_vectors = None
    assert own.asked.steering is None and given.asked.steering is not None


def test_parameters_are_equal_when_they_ask_the_same():
    given = SamplingParams(temperature=0.5, steering_vectors={"post_block": {1: np.ones(2)}})
    assert given == given.clone() and given != SamplingParams(temperature=0.5)
    assert PoolingParams(steering_vectors=VECTORS) != PoolingParams()


@pytest.mark.parametrize("kind", [SamplingParams, PoolingParams])
def test_what_is_asked_and_cannot_be_is_refused_by_name(kind):
    for wrong, message in (
        ({"capture": {"memory": 3}}, r"capture\['memory'\] is int"),
        ({"consumers": {"esamp": 3}}, r"consumers\['esamp'\] is int"),
        ({"steering_positions": "last_prompt"}, "nothing to steer with"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**wrong)


def test_the_engine_gets_plain_data_of_vllms_own_class():
    asked = {"capture": {"memory": {"hooks": {"post_block": [1]}}}}
    given = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, **asked)
    client = a_client(MemoryConsumer())
    client.uses._check_places = lambda *_: None
    client.registered.composer.facts = SimpleNamespace(points=SimpleNamespace(num_layers=4))
    for params, name in ((given, "extra_args"), (PoolingParams(**asked), "extra_kwargs")):
        own = prepare(client, params)
        assert type(own) in (vllm.SamplingParams, vllm.PoolingParams)
        wire = getattr(own, name)[EXTRA_ARG]
        assert msgspec.json.decode(msgspec.json.encode(wire)) == wire
        assert wire["reads"][0]["name"] == "capture['memory']['positions']"


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0, "top_p": 0.5, "top_k": 7},
        {"n": 3, "seed": -1, "max_tokens": None, "min_tokens": 2, "ignore_eos": True},
        {**STOPS, "bad_words": ["x", "x"], "include_stop_str_in_output": False},
        {"logprobs": 5, "prompt_logprobs": 2, "detokenize": False},
        {"logit_bias": {5: 1.0}, "allowed_token_ids": [1, 2]},
    ],
)
def test_vllm_works_with_what_it_would_have_copied_itself(asked):
    given, client = vllm.SamplingParams(**asked), a_client()
    theirs = given.clone()
    for _ in range(2):  # vLLM changes what it is given
        copied = prepare(client, given).clone()
        copied.stop_token_ids.append(11)
        copied._all_stop_token_ids.add(11)
    again = prepare(client, vllm.SamplingParams(**asked)).clone()
    for ours in (prepared(given).clone(), again):
        for name in set(given.__struct_fields__) - {"extra_args", "skip_clone"}:
            assert getattr(ours, name) == getattr(theirs, name), name
            assert type(getattr(ours, name)) is type(getattr(theirs, name)), name


def test_parameters_that_were_changed_are_checked_again():
    client, given = a_client(), vllm.SamplingParams(stop_token_ids=[3], temperature=1)
    assert prepare(client, given).stop_token_ids == [3]
    given.stop_token_ids.append(4)
    assert prepare(client, given)._all_stop_token_ids == {3, 4}
    given.temperature = 1.0
    assert type(prepare(client, given).temperature) is float
    given.stop_token_ids = [1]
    assert prepare(client, given).stop_token_ids == [1]
    given.stop_token_ids = [True]  # equal to what was checked, and no number
    with pytest.raises(ValueError, match="expected `int`, got `bool`"):
        prepare(client, given)
    given.stop_token_ids = [1.0]
    with pytest.raises(Exception, match="must contain only integers"):
        prepare(client, given)
    given.stop_token_ids = []
    given.top_p = 1.5
    with pytest.raises(Exception, match="top_p must be"):
        prepare(client, given)
    given.top_p = 1.0
    assert prepare(client, given).top_p == 1.0


def test_parameters_with_fields_of_their_own_keep_them():
    class Boosted(vllm.SamplingParams):
        boost: float = 0.0

    client = a_client()
    for boost in (1.0, 2.0):
        given = Boosted()
        given.boost = boost
        assert prepare(client, given).clone().boost == boost


def test_seeds_are_told_apart_and_do_not_fill_what_is_kept(monkeypatch):
    client, kept = a_client(), a_client()
    for seed in (5, 6, -1, None, 7):
        given = vllm.SamplingParams(stop=["a"])
        given.seed = seed
        expected = None if seed == -1 else seed
        assert prepare(client, given).seed == expected
    assert len(client.admission._params._known) == 3, "with a seed, with -1, without"
    monkeypatch.setattr(checked_params, "_MAX_KEPT", 2)
    for temperature in (0.1, 0.2, 0.3, 0.4):
        assert prepare(kept, vllm.SamplingParams(temperature=temperature))
        assert len(kept.admission._params._known) <= 2


@pytest.mark.parametrize("make", [SamplingParams, vllm.SamplingParams])
def test_names_of_our_own_messages_are_refused(make):
    with pytest.raises(ValueError, match=r"extra_args\['tllm_bulk'\] was given; names that begin"):
        prepare(a_client(), make(extra_args={"tllm_bulk": "x"}))


def test_what_a_request_asks_of_consumers_is_checked_however_often_its_parameters_were():
    client = a_client(MemoryConsumer())
    client.registered.consumers["memory"].validate_options = lambda options: None
    options = {"enabled": False, "number": 1}
    asked = {"consumers": {"memory": options}}
    prepare(client, vllm.SamplingParams(extra_args={EXTRA_ARG: asked}))
    given = vllm.SamplingParams(extra_args={EXTRA_ARG: asked})
    options["number"] = 2**70
    with pytest.raises(ValueError, match="beyond the 64 bits that a whole number may"):
        prepare(client, given)


def test_what_a_request_asks_is_settled_when_it_is_made():
    options = {"memory": {"enabled": False}}
    client = a_client(MemoryConsumer())
    given = vllm.SamplingParams(extra_args={EXTRA_ARG: {"consumers": options}})
    wire = prepare(client, given).extra_args[EXTRA_ARG]
    options["memory"]["enabled"] = True
    assert wire["consumers"] == {"memory": {"enabled": False}}


def test_parameters_that_were_changed_are_checked_as_vllm_checks_its_copy():
    given = vllm.SamplingParams(temperature=0.8, top_p=0.5)
    given.temperature = 0.0
    assert prepared(given).top_p == given.clone().top_p == 1.0
    given.temperature = -1.0
    with pytest.raises(Exception, match="temperature") as theirs:
        given.clone()
    with pytest.raises(theirs.type, match="temperature"):
        prepared(given)


def test_what_a_request_asks_arrives_as_it_was_sent():
    use = GroupUse("decode", Selection.parse("last_prompt"), "digest")
    read = RowsRead("capture", Selection(), once=True)
    full = RequestSpec(
        request_id="a",
        prompt_id="b",
        num_samples=3,
        consumers={"c": {"k": 1}},
        registrations={"c": "first"},
        reads=(read,),
        wants_tokens=True,
        acted=True,
        steering_rows=(read,),
        isolated=True,
        guided=True,
        steering=(use,),
        patch=(PatchUse("post_block", 1, (4,), 0.5, 0.5, (0, 2), known_digest="digest"),),
        generated=2,
        streamed=True,
        stops=((1, "turned"),),
        aborts=((2, "unwanted"),),
        conversation=ConversationUse(3, 7, ((1, "known"),), (1,), (1,), (1,)),
        media=(("capture", MediaItem("image", 1)),),
    )
    default = RequestSpec()
    same = [f.name for f in fields(full) if getattr(full, f.name) == getattr(default, f.name)]
    assert not same, "fields that this test leaves out"
    for spec in (full, RequestSpec("a", "b")):
        assert (
            RequestSpec.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(spec.to_wire())))
            == spec
        )
    assert RequestSpec("a", "b").to_wire() == {"request_id": "a", "prompt_id": "b"}
    assert RequestSpec("a", "b").is_plain and not full.is_plain


class Mine(Consumer):
    consumer_id = "mine"

    def flows(self):
        return []


@pytest.mark.parametrize("alone", [False, True])
def test_what_was_generated_is_given_though_the_workers_cannot_be_asked_any_more(alone):
    """vLLM's engine refuses calls while it ends, and answers the requests that it has."""
    client = a_client(Mine())
    client.registered.composer.facts = SimpleNamespace(points=SimpleNamespace(num_layers=2))
    with pytest.raises(StopIteration) as done:
        next(client.admission.admit(SamplingParams(), "id"))
    completion = CompletionOutput(0, "text", [5, 6], None, None, finish_reason="length")
    output = RequestOutput("id", None, [1, 2], None, [completion], finished=True)
    output.tllm_request = done.value.value
    output.tllm_request.samples.add(output)
    steps = client.gathering.gather([output], 1.0, alone=alone)
    assert next(steps).method == "take_results"
    with pytest.raises(StopIteration):
        steps.throw(RuntimeError("Server shutting down"))
    result = output.consumer_results["mine"]
    assert (result.status, result.payload) == ("error", None)
    assert "could not be asked for the result: RuntimeError: Server shutting down" in result.error
    assert output.outputs[0].text == "text"


def test_what_was_pending_when_the_workers_could_not_be_asked_any_more_is_lost():
    client = a_client(Mine())
    client.registered.composer.facts = SimpleNamespace(points=SimpleNamespace(num_layers=2))
    with pytest.raises(StopIteration) as done:
        next(client.admission.admit(SamplingParams(), "id"))
    completion = CompletionOutput(0, "text", [5, 6], None, None, finish_reason="length")
    output = RequestOutput("id", None, [1, 2], None, [completion], finished=True)
    output.tllm_request = request = done.value.value
    request.samples.add(output)
    steps = client.gathering.gather([output], None, alone=True)
    assert next(steps).method == "take_results"
    answer = {
        request.prompt_id: {0: {"mine": {"status": "pending", "error": None, "payload": None}}}
    }
    assert steps.send([answer]).method == "take_results"
    with pytest.raises(StopIteration):
        steps.throw(RuntimeError("Server shutting down"))
    result = output.consumer_results["mine"]
    assert result.status == "error"
    assert "could not be asked for the result: RuntimeError: Server shutting down" in result.error


def input_of(client, first=None, **options):
    """An input of a streamed prompt, which asks this of a lens."""
    params = SamplingParams(consumers={"lens": options})
    with pytest.raises(StopIteration) as done:
        next(client.admission.admit(params, "id", streamed=True, first=first))
    later = done.value.value
    if first is not None:
        client.admission.check_input(first, later)
        first.take_in(later)
    return later


def test_inputs_of_a_streamed_prompt_have_the_layers_of_its_lens_in_common():
    """Rows of other layers were taken for those of the last input; where there were more of them,
    the lens was detached for all."""
    client = a_client(LensConsumer())
    points = SimpleNamespace(num_layers=2, check=lambda point, layer: None)
    client.registered.composer.facts = SimpleNamespace(points=points)
    first = input_of(client, layers=[0], top_k=2)
    input_of(client, first, layers=[0], top_k=1, positions="last_prompt")
    refusal = r"consumers\['lens'\]: an input .* otherwise .*\{'layers': \[1\]\} and .* \[0\]\}"
    for again in (False, True):
        if again:  # an input between them goes without
            input_of(client, first, enabled=False)
        with pytest.raises(RefusedError, match=refusal):
            input_of(client, first, layers=[1])
    late = input_of(client, enabled=False)
    input_of(client, late, layers=[0])
    with pytest.raises(RefusedError, match="begin another request"):
        input_of(client, late)
