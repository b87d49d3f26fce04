"""Each port on a real engine, against `transformers`."""

import threading

import numpy as np
import pytest
import torch

from engine.asking import (
    RELATIVE,
    assert_rows_match,
    error_of,
    generate,
    greedy,
    prompts_of,
    sampled,
    tokens_of,
)
from engine.recorder import Recorder
from engine.reference import LAYERS
from tllm.consumers.base import Consumer
from tllm.ports import (
    Actions,
    ConsumerFlow,
    CpuExport,
    Logits,
    RequestMeta,
    ResidualStream,
    Sampler,
    TokenTarget,
)
from tllm.registry import check

BRANCHES = ["attn_in", "attn_heads", "attn_out", "mlp_in", "mlp_out"]

POINTS = ["pre_attn", "post_attn", "post_block", *BRANCHES]


class NamedRecorder(Recorder):
    """Returns what it is told as its flows."""

    def __init__(self, flows):
        super().__init__(ConsumerFlow())
        self.returned = flows

    def flows(self):
        return self.returned


class TestResidualStreamRead:
    def test_every_point_and_layer_gives_the_rows_of_a_forward_hook(self, llm, reference):
        places = {f"{p}{n}": (p, n) for p in POINTS for n in range(LAYERS)}
        places |= {point: (point, None) for point in ("embed", "lm_head_in")}
        reads = [
            ResidualStream.read(layer=layer or 0, site=point, role=role)
            for role, (point, layer) in places.items()
        ]
        recorder = llm.register_consumer(Recorder(ConsumerFlow(reads=reads)))
        outputs = generate(llm, prompts_of([5, 40, 1, 17]), greedy(6))
        assert_rows_match(recorder, outputs, reference, places)
        expected = [reference.greedy(o.prompt_token_ids, 6) for o in outputs]
        assert tokens_of(outputs) == expected

    @pytest.mark.parametrize("phase", ["prefill", "decode", "any"])
    def test_phase_selects_prompt_or_generated_rows(self, llm, reference, phase):
        flow = ConsumerFlow(reads=[ResidualStream.read(layer=2, phase=phase, role="h")])
        recorder = llm.register_consumer(Recorder(flow))
        outputs = generate(llm, prompts_of([30, 3]), greedy(4))
        assert_rows_match(recorder, outputs, reference, {"h": ("post_block", 2)}, phase=phase)

    def test_negative_layer_counts_from_the_end(self, llm, reference):
        flow = ConsumerFlow(reads=[ResidualStream.read(layer=-2, role="h")])
        recorder = llm.register_consumer(Recorder(flow))
        outputs = generate(llm, prompts_of([4]), greedy(3))
        assert_rows_match(recorder, outputs, reference, {"h": ("post_block", LAYERS - 2)})

    def test_a_layer_the_model_lacks_is_refused_with_those_it_has(self, llm):
        flow = ConsumerFlow(reads=[ResidualStream.read(layer=LAYERS)])
        with pytest.raises(ValueError, match=rf"no layer {LAYERS}.*layer from 0 to {LAYERS - 1}"):
            llm.register_consumer(Recorder(flow))
        generate(llm, prompts_of([4]), greedy(2))

    def test_an_unknown_site_is_refused_with_those_there_are(self):
        with pytest.raises(ValueError, match=r"'residual'.*post_block.*block_output"):
            ResidualStream.read(site="residual")

    @pytest.mark.parametrize("ask", [ResidualStream.read, ResidualStream.write])
    @pytest.mark.parametrize("layer", ["three", 1.0, True])
    def test_a_layer_that_is_no_number_is_refused(self, ask, layer):
        with pytest.raises(ValueError, match=f"layer: {layer!r} is not a layer"):
            ask(layer=layer)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reads": ResidualStream.read()}, r"reads=PortRead\(.*no list.*ResidualStream.read"),
        ({"reads": [ResidualStream.write()]}, r"reads=\[PortWrite\(.*no list"),
        ({"writes": ["delta"]}, r"writes=\['delta'\] is no list.*ResidualStream.write"),
    ],
)
def test_a_flow_of_what_no_port_gives_is_refused(given, says):
    with pytest.raises(TypeError, match=says):
        ConsumerFlow(**given)


@pytest.mark.parametrize("number", ["dispatch_every_n_steps", "max_bundle_rows"])
def test_a_flow_counts_in_whole_numbers(number):
    with pytest.raises(ValueError, match=f"{number}=1.5 is not a whole number"):
        ConsumerFlow(**{number: 1.5})


@pytest.mark.parametrize("flows", [None, ConsumerFlow(), ["flow"]])
def test_a_consumer_without_a_list_of_flows_is_refused_by_name(flows):
    """By `register_consumer`, before any worker hears of it."""
    with pytest.raises(TypeError, match=r"flows\(\) of consumer 'recorder' returned .* a list of"):
        check(NamedRecorder(flows))


class Bare(Consumer):
    """A consumer with no method but `flows`."""

    consumer_id = "bare"

    def __init__(self, **asked):
        self.asked = asked

    def flows(self):
        yield ConsumerFlow(**self.asked)


class Coroutine(Bare):
    async def consume_bundle(self, bundle, ctx):
        """Nobody would await it."""


class Generator(Bare):
    def on_step_end(self, ctx):
        """Nobody would go through it."""
        yield


@pytest.mark.parametrize(
    ("asked", "lacks"),
    [
        ({"writes": [Sampler.write()]}, "guide"),
        ({"reads": [ResidualStream.read()], "writes": [Actions.write("stop")]}, "decide"),
        ({"writes": [CpuExport.write(channel="states")]}, "on_export"),
    ],
)
def test_a_consumer_without_a_method_for_what_it_asks_is_refused(asked, lacks):
    """It would be given nothing, and nobody would hear of it."""
    with pytest.raises(TypeError, match=f"'bare' needs a method {lacks} of its own, and Bare has"):
        check(Bare(**asked))
    check(Bare(writes=[ResidualStream.write()]))


def test_a_consumer_that_reads_rows_for_nobody_is_told(caplog):
    check(Bare(reads=[ResidualStream.read()]))
    assert "'bare' reads rows, and Bare has no consume_bundle of its own" in caplog.text


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Coroutine, "consume_bundle of consumer 'bare' is async"),
        (Generator, "on_step_end of consumer 'bare' is a generator"),
    ],
)
def test_a_method_that_would_be_called_and_do_nothing_is_refused(kind, says):
    with pytest.raises(TypeError, match=says):
        check(kind(writes=[ResidualStream.write()]))


class Saving(Bare):
    """Names methods that may be called from the user's process."""

    def __init__(self, *remote_methods):
        super().__init__()
        self.remote_methods = remote_methods[0] if remote_methods == ("save",) else remote_methods

    def save(self):
        """There is one."""

    async def later(self):
        """Nobody would await it."""


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (("save",), r"remote_methods='save' of consumer 'bare' is one text; .*: \('save',\)"),
        (("save", "lod"), "remote_methods of consumer 'bare' names 'lod', and Saving has no such"),
        (("save", "asked"), "names 'asked', and Saving has no such method"),
        (("save", "later"), "later of consumer 'bare' is async"),
    ],
)
def test_what_could_not_be_called_from_the_users_process_is_refused(named, says):
    with pytest.raises(TypeError, match=says):
        check(Saving(*named))
    check(Saving("save", "read_stats"))
    for attribute in ("one_prompt_options", "lasting_options"):
        one = type("One", (Saving,), {attribute: "name"})
        with pytest.raises(TypeError, match=rf"{attribute}='name' of .* \('name',\)"):
            check(one())


def test_request_meta_tells_who_each_row_belongs_to(llm):
    flow = ConsumerFlow(
        reads=[ResidualStream.read(layer=0, role="h"), RequestMeta.read(role="who")]
    )
    recorder = llm.register_consumer(MetaRecorder(flow))
    outputs = generate(llm, prompts_of([4, 30]), sampled(3, n=2))
    infos = {(i.request_id, i.sample_index): i for i in recorder.log.started}
    assert len(infos) == 4
    for output in outputs:
        both = [infos[output.request_id, sample] for sample in (0, 1)]
        assert {i.prompt_len for i in both} == {len(output.prompt_token_ids)}
        assert {i.num_samples for i in both} == {2}
        assert len({i.prompt_id for i in both}) == 1
        assert len({i.slot for i in both}) == 2
    for call in recorder.log.calls:
        assert call.entries["same"] is True
        assert (call.meta.is_prefill == (call.key["phase"] == "prefill")).all()


class MetaRecorder(Recorder):
    """Notes whether the entry of `RequestMeta` describes the bundle's rows."""

    def consume_bundle(self, bundle, ctx) -> None:
        super().consume_bundle(bundle, ctx)
        self.log.calls[-1].entries["same"] = bundle.entries["who"] is bundle.meta


@pytest.mark.parametrize("window", ["same_step", "next_step", "out_of_band", "background"])
def test_logits_are_the_models_own_in_every_window(llm, reference, window):
    recorder = llm.register_consumer(Recorder(ConsumerFlow(reads=[Logits.read()], window=window)))
    params = sampled(4, temperature=0.5, seed=2, presence_penalty=1.0, top_k=5, logit_bias={3: 2.0})
    outputs = generate(llm, prompts_of([5, 40]), [params, greedy(4)])
    rows = recorder.rows("logits")
    assert len(rows) == 8
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logits, _ = reference.run(tokens[:-1])
        for position in range(len(output.prompt_token_ids) - 1, len(tokens) - 1):
            error = error_of(rows[output.request_id, 0, position], logits[position])
            assert error < RELATIVE


def test_logits_rows_align_with_the_residual_rows_of_the_flow(llm, reference):
    reads = [Logits.read(), ResidualStream.read(site="lm_head_in", role="state")]
    recorder = llm.register_consumer(Recorder(ConsumerFlow(reads=reads)))
    generate(llm, prompts_of([5, 40, 3]), greedy(3))
    for call in recorder.log.calls:
        with torch.no_grad():
            expected = reference.model.lm_head(call.entries["state"])
        torch.testing.assert_close(call.entries["logits"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", ["same_step", "next_step", "out_of_band", "background"])
def test_token_target_is_the_next_token_across_chunks_and_sampling(llm, window):
    reads = [TokenTarget.read(role="next"), ResidualStream.read(layer=0, role="h")]
    recorder = llm.register_consumer(Recorder(ConsumerFlow(reads=reads, window=window)))
    outputs = generate(llm, prompts_of([60, 5, 24, 49]), sampled(4))
    rows = recorder.rows("next")
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        found = [int(rows[output.request_id, 0, i]) for i in range(len(tokens) - 1)]
        assert found == tokens[1:]


class Exporter(Recorder):
    def consume_bundle(self, bundle, ctx) -> None:
        ctx.export("states", {"h": bundle.entries["h"]}, bundle.meta)
        bundle.entries["h"].zero_()  # the receiver has a copy


def test_exported_tensors_arrive_on_a_delivery_thread(llm, reference):
    flow = ConsumerFlow(
        reads=[ResidualStream.read(layer=1, role="h")], writes=[CpuExport.write(channel="states")]
    )
    exporter = llm.register_consumer(Exporter(flow))
    (output,) = generate(llm, prompts_of([9]), greedy(3))
    exporter.synchronize()
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    _, states = reference.run(tokens, [("post_block", 1)])
    positions = []
    for channel, tensors, meta, thread in exporter.log.exports:
        assert channel == "states"
        assert thread != threading.main_thread().name
        for row, position in zip(tensors["h"], meta.positions, strict=True):
            assert error_of(row, states["post_block", 1][position]) < RELATIVE
            positions.append(int(position))
    assert positions == list(range(len(tokens)))


class Attaching(Recorder):
    """Exports two tensors of different sizes with an object each."""

    def consume_bundle(self, bundle, ctx) -> None:
        rows = bundle.entries["h"]
        doubled = rows * ctx.upload(np.full(1, 2.0, np.float32))
        half = ctx.to_host(rows / 2)
        ctx.export("states", {"h": rows}, bundle.meta, attach=("first", half))
        ctx.export("states", {"h": doubled}, attach=("second", rows.clone()))

    def on_export(self, channel, tensors, meta, attached) -> None:
        self.log.exports.append((attached, tensors["h"], meta, ""))


def test_objects_travel_with_what_is_exported(llm):
    flow = ConsumerFlow(
        reads=[ResidualStream.read(layer=1, role="h")], writes=[CpuExport.write(channel="states")]
    )
    attaching = llm.register_consumer(Attaching(flow))
    generate(llm, prompts_of([9]), greedy(3))
    attaching.synchronize()
    exports = attaching.log.exports
    assert len(exports) == 6
    for ((name, half), rows, meta, _), ((other, same), doubled, none, _) in zip(
        exports[::2], exports[1::2], strict=True
    ):
        assert (name, other, none) == ("first", "second", None)
        assert len(rows) == len(meta)
        assert torch.equal(half.wait() * 2, rows)
        assert torch.equal(same.cpu() * 2, doubled)


def test_attaching_for_a_receiver_that_does_not_take_it_is_an_error_that_says_so(llm):
    class Wrong(Attaching):
        def on_export(self, channel, tensors, meta) -> None:
            raise AssertionError

    flow = ConsumerFlow(
        reads=[ResidualStream.read(layer=1, role="h")], writes=[CpuExport.write(channel="states")]
    )
    llm.register_consumer(Wrong(flow))
    (output,) = generate(llm, prompts_of([9]), greedy(1))
    assert "define on_export(self, channel, tensors, meta, attached)" in (
        output.consumer_results["recorder"].error
    )


def test_an_undeclared_channel_is_an_error_that_names_the_declared_ones(llm):
    flow = ConsumerFlow(
        reads=[ResidualStream.read(layer=1, role="h")], writes=[CpuExport.write(channel="other")]
    )
    llm.register_consumer(Exporter(flow))
    (output,) = generate(llm, prompts_of([9]), greedy(3))
    result = output.consumer_results["recorder"]
    assert result.status == "error"
    assert "'states'" in result.error and "other" in result.error


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"h": np.ones(3)}, "ndarray cannot be brought to the host; give a tensor"),
        (torch.ones(3), 'was given Tensor; give tensors by name: {"states": tensor}'),
    ],
)
def test_what_is_no_tensor_by_name_is_not_exported_and_the_error_says_so(llm, given, says):
    class Wrong(Attaching):
        def consume_bundle(self, bundle, ctx):
            ctx.export("states", given)

    flow = ConsumerFlow(
        reads=[ResidualStream.read(layer=1, role="h")], writes=[CpuExport.write(channel="states")]
    )
    llm.register_consumer(Wrong(flow))
    (output,) = generate(llm, prompts_of([9]), greedy(1))
    assert says in output.consumer_results["recorder"].error


def test_an_array_that_was_uploaded_may_be_used_again(llm):
    class Reusing(Attaching):
        def consume_bundle(self, bundle, ctx):
            array = np.zeros(1, np.int64)
            kept = []
            for number in range(3):
                array[:] = number
                kept.append(ctx.upload(array))
            ctx.export("states", {"h": torch.cat(kept)}, attach="once")

    flow = ConsumerFlow(
        reads=[ResidualStream.read(layer=1, role="h")], writes=[CpuExport.write(channel="states")]
    )
    reusing = llm.register_consumer(Reusing(flow))
    generate(llm, prompts_of([9]), greedy(1))
    reusing.synchronize()
    [(_, numbers, *_)] = reusing.log.exports
    assert numbers.tolist() == [0, 1, 2]
