"""Several front ends over the same workers agree, and do not take away what another one uses."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
from engine.asking import generate, greedy, prompts_of, tokens_of
from tiny_engines import TINY_ENGINE

from tllm import LLM, SamplingParams
from tllm.answers import SharedFolder
from tllm.client.attached import Client
from tllm.client.calls import ALONE, TOGETHER, AsyncCalls, Pause, SyncCalls, WorkerCall, drive
from tllm.client.held import HeldByWorkers
from tllm.client.steering import SteeringControl
from tllm.consumers.logging import LoggingConsumer
from tllm.engine.registered import HeldGroups, Registered
from tllm.shared_memory import FOLDER

ROWS = 4
FACTS = SimpleNamespace(max_mib=1, dtype="float32", row_bytes=2**20 // ROWS)


class Workers:
    """What the workers keep of vectors and groups."""

    def __init__(self):
        self.groups, self.vectors = {}, {}

    def put(self, vectors, groups, gates):
        self.vectors |= vectors
        self.groups |= groups
        for operations in groups.values():
            assert all(vector in self.vectors for _, _, vector, _ in operations)

    def drop(self, groups, vectors):
        for digest in groups:
            del self.groups[digest]
        for digest in vectors:
            del self.vectors[digest]


def group_of(*layers):
    vectors = {f"{layer}": np.full(4, layer, np.float32) for layer in layers}
    entries = {"post_block": {int(name): vector for name, vector in vectors.items()}}
    (group,) = SamplingParams(steering_vectors=entries).asked.steering.groups
    return group


class Front:
    def __init__(self, name, workers):
        self.name, self.workers, self.held = name, workers, HeldByWorkers()
        workers.attach(name)

    def ask(self, prompt_id, group, front_ends=2):
        if not self.held.has([group]):
            upload = self.held.upload([group], FACTS, front_ends)
            operations = {digest: each.operations for digest, each in upload.groups.items()}
            self.workers.put(self.name, upload.vectors, operations, upload.released)
            self.held.sent(upload, True)
        self.held.hold(prompt_id, (group,))


def test_front_ends_do_not_evict_each_others_groups():
    there = Workers()
    groups = HeldGroups(there)
    first, second = Front("first", groups), Front("second", groups)
    shared = group_of(1)
    first.ask("a", shared)
    second.ask("b", shared)
    assert len(there.groups) == 1
    for layer in (2, 3, 4, 5):  # the first has room for two: one is in use
        first.ask(f"p{layer}", group_of(layer))
        first.held.release(f"p{layer}")
    first.held.release("a")
    first.ask("c", group_of(6))
    first.ask("d", group_of(7))
    assert shared.digest in there.groups, "the second still runs with it"
    second.held.release("b")
    second.ask("e", group_of(8))
    second.ask("f", group_of(9))
    assert set(there.groups) == {group_of(layer).digest for layer in (6, 7, 8, 9)}
    assert groups.num_vectors == len(there.vectors) == ROWS


def test_a_front_end_has_room_for_what_runs_and_says_when_there_is_none():
    front = Front("only", HeldGroups(Workers()))
    front.ask("a", group_of(1, 2), front_ends=1)
    front.ask("b", group_of(3), front_ends=1)
    with pytest.raises(ValueError, match=r"1\.2 MiB of vectors.*max_steering_mib=1;"):
        front.ask("c", group_of(4, 5), front_ends=1)
    with pytest.raises(ValueError, match="max_steering_mib=1 between 2 front ends"):
        front.ask("c", group_of(4), front_ends=2)
    front.held.release("a")
    front.ask("c", group_of(4, 5), front_ends=1)


def brought(call):
    """The groups that a call brings, and that their vectors come with them."""
    _, vectors, groups, _, _ = call.args
    there = {*vectors}
    assert len(vectors.rows) == len(vectors.digests)
    assert all(vector in there for each in groups.values() for _, _, vector, _ in each)
    return set(groups)


def over(steps, answer=None):
    """Whether steps have come to their end with this answer."""
    try:
        steps.send(answer)
    except StopIteration:
        return True
    return False


def test_requests_that_wait_for_the_workers_are_brought_together_if_there_is_room():
    client = Client()
    client.registered.composer.facts = FACTS
    groups = [group_of(layer) for layer in (1, 2, 3)]
    first, second, third = (client.uploads.bring([group]) for group in groups)
    assert next(first) is ALONE and next(second) is ALONE
    assert brought(next(first)) == {groups[0].digest, groups[1].digest}
    assert next(third) is ALONE  # and waits for the call that is under way
    assert over(first) and over(second)
    assert brought(third.send(None)) == {groups[2].digest}
    assert over(third)
    wide = group_of(4, 5)
    fourth, fifth = client.uploads.bring([group_of(6)]), client.uploads.bring([wide])
    client.held.hold("a", tuple(groups))
    assert next(fourth) is ALONE and next(fifth) is ALONE
    assert brought(next(fourth)) == {group_of(6).digest}
    assert over(fourth)
    with pytest.raises(ValueError, match="max_steering_mib"):
        next(fifth)


def gated_group(layer):
    probe = {"hook": "pre_attn", "layer": 0, "vector": np.ones(4, np.float32)}
    entry = {"vector": np.full(4, layer, np.float32), "when": {"probe": probe, "above": 0.0}}
    asked = SamplingParams(steering_vectors={"post_block": {layer: [entry]}}).asked
    (group,) = asked.steering.groups
    return group


def test_conditions_are_brought_together_and_one_by_one_where_one_is_refused():
    client = Client()
    client.registered.composer.facts = SimpleNamespace(max_mib=1, dtype="float32", row_bytes=64)
    bring, groups = client.uploads.bring, [gated_group(layer) for layer in (1, 2, 3)]
    first, refused, third = (bring([group]) for group in groups)
    assert [next(steps) for steps in (first, refused, third)] == [ALONE] * 3
    assert brought(next(first)) == {group.digest for group in groups}
    assert first.throw(ValueError("one is refused")) is ALONE
    alone = first.send(None)
    assert brought(alone) == {groups[0].digest} <= {*alone.args[3]}  # if a worker has it already
    assert over(first)
    assert brought(refused.send(None)) == {groups[1].digest, groups[2].digest}
    assert refused.throw(ValueError("one is refused")) is ALONE
    assert brought(refused.send(None)) == {groups[1].digest}
    with pytest.raises(ValueError, match="it is this one"):
        refused.throw(ValueError("it is this one"))
    assert brought(third.send(None)) == {groups[2].digest}
    assert over(third)
    assert [client.held.has([group]) for group in groups] == [True, False, True]


def test_steps_are_alone_until_they_end_or_let_others_go_on():
    done = []

    def steps(name):
        yield ALONE
        done.append(f"{name} alone")
        yield Pause(0.01)
        done.append(f"{name} together")
        yield TOGETHER
        yield Pause(0.05)
        yield ALONE
        done.append(f"{name} alone again")
        yield Pause(0.01)
        done.append(f"{name} over")

    async def run():
        calls = AsyncCalls(None, "")
        await asyncio.gather(*(calls.run(steps(name)) for name in "ab"))

    asyncio.run(run())
    assert done == [
        *("a alone", "a together", "b alone", "b together"),
        *("a alone again", "a over", "b alone again", "b over"),
    ]


def test_what_a_call_brought_whose_answer_nobody_saw_is_given_up_with_the_next():
    there = Workers()
    front, lost, wanted = Front("only", HeldGroups(there)), group_of(1), group_of(2)
    for group in (lost, wanted):
        upload = front.held.upload([group], FACTS, 1)
        operations = {digest: each.operations for digest, each in upload.groups.items()}
        front.workers.put(front.name, upload.vectors, operations, upload.released)
        front.held.sent(upload, group is wanted)
    assert not front.held.has([lost]) and front.held.has([wanted])
    assert set(there.groups) == {wanted.digest} and set(there.vectors) == set(wanted.vectors)
    front.ask("a", lost, front_ends=1)
    assert set(there.groups) == {lost.digest, wanted.digest}


def test_what_came_with_a_group_that_is_refused_is_given_up():
    class Refusing(Workers):
        def put(self, vectors, groups, gates):
            super().put(vectors, groups, gates)
            if len(groups) > 1:
                raise ValueError("no tap for the second")

    there = Refusing()
    held, first, second, third = HeldGroups(there), group_of(1), group_of(1, 2), group_of(3)
    held.put("one", first.vectors, {first.digest: first.operations}, [])
    both = {group.digest: group.operations for group in (second, third)}
    with pytest.raises(ValueError, match="no tap"):
        held.put("one", {**second.vectors, **third.vectors}, both, [])
    assert set(there.groups) == {first.digest} and set(there.vectors) == set(first.vectors)


def test_what_a_front_end_that_is_gone_held_is_given_up():
    there = Workers()
    groups = HeldGroups(there)
    Front("tllm-0-0-0-gone", groups).ask("a", group_of(1))
    assert there.groups
    assert groups.attach("another") == 1
    assert not there.groups and not there.vectors


def test_a_forked_process_takes_no_shared_folder_away():
    """Workers would take its front end to be gone, or on another host."""
    folder = SharedFolder()
    file = FOLDER / folder.token
    if not (child := os.fork()):
        del folder
        os._exit(0)
    os.waitpid(child, 0)
    assert file.exists()
    del folder
    assert not file.exists()


def test_who_did_not_see_the_last_change_changes_nothing():
    registered = Registered()
    assert registered.change("steering", 0, b"a")
    assert not registered.change("steering", 0, b"b")
    assert registered.since(0) == (1, {"steering": (1, b"a")}, False)
    assert registered.change("steering", 1, None)
    assert registered.change("module:x", 0, b"c")
    assert registered.since(1) == (3, {"steering": (2, None), "module:x": (3, b"c")}, False)


def test_of_what_was_removed_long_ago_nothing_is_kept():
    """Who has not heard of it is told all that there is."""
    registered, front = Registered(), Client().registered
    front._attached = True

    def heard():
        steps = front._fetch()
        call = next(steps)
        assert over(steps, [registered.since(*call.args)])
        return set(front._versions)

    registered.put("module:long ago", cloudpickle.dumps({}))
    registered.put("module:here", cloudpickle.dumps({}))
    assert heard() == {"module:long ago", "module:here"}
    registered.put("module:long ago", None)
    for number in range(10_000):
        registered.put(f"kept:{number}", b"rows")
        registered.put(f"kept:{number}", None)
    assert len(registered.since(0).entries) < 5000
    assert heard() == {"module:here"} and set(front.composer.modules) == {"here"}
    assert front.steering_version == registered.version
    assert registered.change("module:long ago", 0, b"again"), "as it is known: not there"


class Replica:
    """What the workers of one replica know of consumers."""

    def __init__(self):
        self.registered, self.consumers = Registered(), {}
        self.registered_since = self.registered.since

    def register(self, name, payload):
        if name in self.consumers:
            return False
        *_, self.consumers[name] = cloudpickle.loads(payload)
        self.registered.put(f"consumer:{name}", payload)
        return True

    def withdraw(self, name, registration):
        if self.consumers.get(name) == registration:
            del self.consumers[name]
            self.registered.put(f"consumer:{name}", None)

    def registered_consumers(self):
        return dict(self.consumers)


def fronts_of_two_replicas():
    fronts = [Client().registered for _ in "ab"]
    for front in fronts:
        front.replicas = 2
    return fronts


def test_replicas_have_one_consumer_though_two_front_ends_register_it_at_one_moment():
    """Each of them asks the replicas at once, and these hear of both in different orders."""
    replicas, fronts = (Replica(), Replica()), fronts_of_two_replicas()
    steps = [front.add(LoggingConsumer(), False) for front in fronts]
    calls = [next(each) for each in steps]
    in_order = [[replicas[0].register(*call.args) for call in calls]]
    in_order.append([replicas[1].register(*call.args) for call in reversed(calls)][::-1])
    assert in_order == [[True, False], [False, True]]
    waiting = dict(zip(steps, map(list, zip(*in_order, strict=True)), strict=True))
    added = {}
    while waiting:
        for each, answers in list(waiting.items()):
            try:
                call = each.send(answers)
            except StopIteration as done:
                added[each] = done.value
                del waiting[each]
            else:
                asked = not isinstance(call, Pause)
                waiting[each] = asked and [getattr(r, call.method)(*call.args) for r in replicas]
    assert [added[each] for each in steps] == [True, False]
    known = [front.ids for front in fronts]
    assert known[0] == known[1] == replicas[0].consumers == replicas[1].consumers


def test_a_front_end_does_not_ask_a_replica_for_a_consumer_that_is_not_there_yet():
    """What another front end registers reaches each replica in its own time."""
    replicas, (first, second) = (Replica(), Replica()), fronts_of_two_replicas()
    register = next(first.add(LoggingConsumer(), False))
    assert replicas[0].register(*register.args)
    steps = second._fetch()
    call = next(steps)
    for _ in range(3):
        while not isinstance(call, Pause):
            call = steps.send([getattr(each, call.method)(*call.args) for each in replicas])
        assert not second.consumers
        call = steps.send(None)
    assert replicas[1].register(*register.args)
    assert over(steps, [getattr(each, call.method)(*call.args) for each in replicas])
    assert second.ids == replicas[0].consumers


class SecondFront:
    """What the user of another front end calls."""

    def __init__(self, client, run):
        self.client, self.run, self.steering = client, run, SteeringControl(client, run)
        client.registered.speak_for(self)


@pytest.fixture(scope="module")
def two(tiny_model):
    """An engine, and a second front end of its workers."""
    llm = LLM(tiny_model, **TINY_ENGINE)
    other = Client()
    calls = SyncCalls(llm.llm_engine, other.shared.token, list)
    return llm, SecondFront(other, calls.run)


def test_what_one_front_end_sets_steers_the_requests_of_the_other(two):
    llm, other = two
    prompts = prompts_of([5, 9])
    plain = tokens_of(generate(llm, prompts, greedy(4)))
    vector = np.linspace(-3, 3, llm.steering.layers()["hidden_size"])
    other.steering.set({"post_block": {2: vector}})
    steered = tokens_of(generate(llm, prompts, greedy(4)))
    assert steered != plain
    assert llm.steering.status()["global"].keys() == {"vectors"}
    llm.steering.clear()
    assert other.steering.status()["global"] == {}
    llm.steering.register_module("m", {"post_block": {2: vector}})
    assert set(other.steering.modules()) == {"m"}
    assert llm.steering.version == other.steering.version
    asked = greedy(4, steering_module_ref="m")
    assert tokens_of(generate(llm, prompts, asked)) == steered
    other.steering.unregister_module("m")
    with pytest.raises(ValueError, match="no module 'm' is registered"):
        generate(llm, prompts, asked)
    assert tokens_of(generate(llm, prompts, greedy(4))) == plain


def known(client):
    """Steps that say which consumers a front end knows of."""
    yield from client.registered.current()
    return client.registered.consumers


def test_consumers_of_one_front_end_serve_the_requests_of_the_other(two):
    llm, other = two
    mine = llm.register_consumer(LoggingConsumer())
    assert "logging" in other.run(known(other.client))
    with pytest.raises(ValueError, match="consumer_id='logging' is registered"):
        other.run(other.client.registered.register(LoggingConsumer()))
    other.run(other.client.registered.unregister("logging"))
    assert "logging" not in llm.intervention_stats()[0]["consumers"]
    generate(llm, prompts_of([5]), greedy(1))
    assert llm.consumers == {} and not mine.is_attached_to(llm)
    with pytest.raises(RuntimeError, match="'logging' is not registered with an engine"):
        mine.read_stats()


def test_a_request_hears_that_another_front_end_removed_its_consumer(two):
    llm, other = two
    llm.register_consumer(LoggingConsumer())
    asked = greedy(4, consumers={"logging": {}})
    for name, params in (("asked", asked), ("not asked", greedy(4))):
        llm.llm_engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, params)
    llm.llm_engine.step()
    other.run(other.client.registered.unregister("logging"))
    ended = {}
    while llm.llm_engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in llm.llm_engine.step()}
    result = ended["asked"].outputs[0].consumer_results["logging"]
    assert result.status == "error"
    assert result.error == "the consumer was unregistered before the request had ended"
    assert ended["not asked"].outputs[0].consumer_results == {}


def test_a_request_may_capture_while_somebody_removes_all_consumers(two):
    llm, _ = two
    vector = np.full(llm.steering.layers()["hidden_size"], 0.125)
    capture = {"memory": {"hooks": {"post_block": [1]}}}
    asked = greedy(1, capture=capture, steering_vectors={"post_block": {2: vector}})
    brought = []

    def do(step):
        answer = llm._sync.calls._do(step)
        if isinstance(step, WorkerCall) and step.method == "update_steering":
            brought.append(step)
            llm.clear_consumers()
        return answer

    request = drive(llm._tllm.admission.admit(asked, "mine"), do)
    llm._tllm.held.release(request.prompt_id)
    assert len(brought) == 1 and request.captures == ("memory",)
    assert "memory" in llm.consumers


def test_a_consumer_that_is_gone_when_it_is_first_heard_of_is_gone():
    """Another front end may remove it before who registered it asks what is new."""
    registered = Client().registered
    registered._own["logging"] = payload = b"the one that was registered"
    registered._adopt(LoggingConsumer(), False, "first")
    registered._learn_consumer("logging", payload)
    assert "logging" in registered.consumers
    registered._own["logging"] = payload
    registered._learn_consumer("logging", None)
    assert not registered.consumers


def test_a_steady_request_asks_the_workers_nothing(two, monkeypatch):
    llm, _ = two
    asked = greedy(
        1, steering_vectors={"post_block": {1: np.ones(llm.steering.layers()["hidden_size"])}}
    )
    generate(llm, prompts_of([5]), asked)
    calls = []
    ask = llm._sync.calls.ask
    monkeypatch.setattr(
        llm._sync.calls, "ask", lambda call: (calls.append(call.method), ask(call))[1]
    )
    params = [greedy(1), asked]
    for each in params:
        steps = llm._tllm.admission.admit(each, "steady")
        with pytest.raises(StopIteration) as done:
            next(steps)
        llm._tllm.held.release(done.value.value.prompt_id)
    assert calls == []
