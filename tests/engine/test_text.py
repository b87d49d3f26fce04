"""Requests in words: chat, stop strings and the end-of-text token, on the demo model."""

from pathlib import Path

import pytest
import torch
from tiny_engines import SHARE
from vllm.sampling_params import StructuredOutputsParams

import tllm.stores
from engine.asking import error_of
from engine.modes import Reader
from engine.reference import Addition, PatchedRow, Reference
from tllm import LLM, SamplingParams
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.consumers.lens import LensConsumer
from tllm.consumers.next_token import NextTokenConsumer
from tllm.ports import ResidualStream
from tllm.runtime.kernels.backend import INTERPRETED

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
READ = ResidualStream.read(layer=2, site="post_block", role="hidden")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Where vLLM's profiler writes."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def demo_engine(traces):
    return LLM(
        str(DEMO_MODEL),
        dtype="float32",
        enforce_eager=True,
        **SHARE,
        max_model_len=256,
        max_num_seqs=8,
        num_gpu_blocks_override=512,
        disable_log_stats=True,
        profiler_config={
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
        },
    )


@pytest.fixture
def llm(demo_engine):
    demo_engine.register_consumer(Reader("reader", READ))
    yield demo_engine
    demo_engine.clear_consumers()


def rows(output, sample=0):
    """Positions of the rows that came back with one sample."""
    return output.outputs[sample].consumer_results["reader"].payload.positions.tolist()


def passed(output, sample=0):
    """Positions of the tokens that passed the model and belong to the output."""
    return list(range(len(output.prompt_token_ids) + len(output.outputs[sample].token_ids) - 1))


def test_chat_is_read_like_generate(llm):
    params = SamplingParams(temperature=0, max_tokens=12)
    (chatted,) = llm.chat(
        [{"role": "user", "content": "Tell me a story about Leo."}], params, use_tqdm=False
    )
    (generated,) = llm.generate(
        {"prompt_token_ids": chatted.prompt_token_ids}, params, use_tqdm=False
    )
    assert chatted.outputs[0].token_ids == generated.outputs[0].token_ids
    assert rows(chatted) == rows(generated) == passed(chatted)


@pytest.mark.skipif(INTERPRETED, reason="Triton does not interpret vLLM's kernel for masks")
def test_logits_have_the_mask_of_structured_outputs(llm):
    llm.register_consumer(NextTokenConsumer())
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
        consumers={"next_token": {}},
    )
    (output,) = llm.generate("Is Leo happy?", params, use_tqdm=False)
    (values,) = output.outputs[0].consumer_results["next_token"].payload.values
    allowed = torch.from_numpy(values).isfinite().nonzero()[:, 0].tolist()
    words = {llm.get_tokenizer().decode([token]) for token in allowed}
    assert words and all("yes".startswith(word) or "no".startswith(word) for word in words)
    assert output.outputs[0].token_ids[0] in allowed


def test_a_stop_string_cuts_the_rows_with_the_output(llm):
    whole = SamplingParams(temperature=0, max_tokens=40)
    (free,) = llm.generate("Leo walked to the garden.", whole, use_tqdm=False)
    word = free.outputs[0].text.split()[3]
    params = SamplingParams(temperature=0, max_tokens=40, stop=[word])
    (stopped,) = llm.generate("Leo walked to the garden.", params, use_tqdm=False)
    assert stopped.outputs[0].finish_reason == "stop"
    assert len(stopped.outputs[0].token_ids) < len(free.outputs[0].token_ids)
    assert rows(stopped) == passed(stopped)


def test_a_stop_string_that_is_found_late_cuts_the_record_on_disk(llm, monkeypatch, tmp_path):
    """The request has ended in the engine by then, as in one of another process, and its workers
    have heard of that with a step of another request."""
    core = llm.llm_engine.engine_core
    step = core.get_output

    def steps():
        outputs = step()
        for _ in range(15):
            outputs.outputs += step().outputs
        return outputs

    llm.register_consumer(FilesystemConsumer(tmp_path))
    capture = {"filesystem": {"hooks": {"post_block": [2]}}}
    whole = SamplingParams(temperature=0, max_tokens=12, capture=capture)
    (free,) = llm.generate("Leo walked to the garden.", whole, use_tqdm=False)
    word = free.outputs[0].text.split()[3]
    monkeypatch.setattr(core, "get_output", steps)
    params = SamplingParams(temperature=0, max_tokens=12, capture=capture, stop=[word])
    longer = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["Leo walked to the garden.", "Mia"]
    stopped, _ = llm.generate(prompts, [params, longer], use_tqdm=False)
    assert stopped.outputs[0].finish_reason == "stop"
    for output in (free, stopped):
        (sample,) = output.outputs
        payload = sample.capture_results["filesystem"].payload
        record = tllm.stores.open(tmp_path).record(payload.request_id, tag=payload.tag)
        assert list(record.token_ids) == [*output.prompt_token_ids, *sample.token_ids]
        assert record.positions("post_block", 2).tolist() == passed(output) == rows(output)


def test_samples_that_end_by_themselves_have_their_own_rows(llm):
    params = SamplingParams(temperature=1.0, max_tokens=120, n=4)
    (output,) = llm.generate("Leo walked to the garden.", params, use_tqdm=False)
    assert any(sample.finish_reason == "stop" for sample in output.outputs)
    for sample in range(4):
        assert rows(output, sample) == passed(output, sample)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("door", ["text", "tokens", "chat"])
def test_positions_are_those_of_a_truncated_prompt(llm, door, side):
    """vLLM cuts the prompt before anything of ours counts its tokens."""
    llm.register_consumer(LensConsumer(layers=[1]))
    text = "It was a wonderful day for Kira. She walked to the garden and saw a big dog."
    whole = llm.get_tokenizer()(text)["input_ids"]
    vector = torch.linspace(-2, 2, 128)
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        capture={"memory": {"hooks": {"post_block": [0, 1, 2]}, "positions": "all_prompt"}},
        consumers={"lens": {"positions": [-2], "top_k": 3}},
        steering_vectors={"post_block": {0: {"vector": vector, "positions": [1, -1]}}},
        patch=[{"hook": "post_block", "layer": 1, "positions": [2], "source": {"zero": True}}],
    )
    cut = {"truncate_prompt_tokens": 6} | ({} if side is None else {"truncation_side": side})
    asked = {"sampling_params": params, "use_tqdm": False, "tokenization_kwargs": cut}
    if door == "chat":
        [output] = llm.chat([{"role": "user", "content": text}], **asked)
    else:
        prompt = {"prompt_token_ids": whole} if door == "tokens" else text
        [output] = llm.generate(prompt, **asked)
        assert output.prompt_token_ids == (whole[:6] if side == "right" else whole[-6:])
    ids = output.prompt_token_ids
    assert len(ids) == 6
    expected, places = Reference(DEMO_MODEL), [("post_block", layer) for layer in range(3)]
    added = [Addition(places[0], vector, at, at + 1) for at in (1, 5)]
    zero = PatchedRow(places[1], 2, torch.zeros(128))
    _, seen = expected.run(ids, places, added, [zero])
    for layer, place in enumerate(places):
        found = output.activations["post_block"][layer]
        assert found.positions.tolist() == list(range(6))
        assert error_of(found.tensor, seen[place]) < 1e-4
    lens = output.consumer_results["lens"].payload["logprobs"]
    assert lens.positions.tolist() == [4]
    beyond = [{"hook": "post_block", "layer": 1, "positions": [8], "source": {"zero": True}}]
    asked["sampling_params"] = SamplingParams(max_tokens=1, patch=beyond)
    with pytest.raises(ValueError, match="position 8 is out of range for a prompt of 6 tokens"):
        llm.generate(text, **asked)


def stepped(llm, params, between):
    """The last output of a request, and its tokens that passed the model.

    Args:
        between: what is called after which step.
    """
    engine, steps, last = llm.llm_engine, 0, None
    engine.add_request("stepped", "It was a wonderful day for Kira.", params)
    while engine.has_unfinished_requests():
        last = next((output for output in engine.step() if output.finished), last)
        steps += 1
        between.get(steps, lambda: None)()
    return last, [*last.prompt_token_ids, *last.outputs[0].token_ids[:-1]]


STEERED = {
    "capture": {"memory": {"hooks": {"post_block": [0, 1]}, "positions": "all"}},
    "steering_vectors": {"post_block": {0: torch.linspace(-2, 2, 128)}},
}


def assert_as_steered(output, tokens):
    """The rows of a request that asked for `STEERED`."""
    vector, places = STEERED["steering_vectors"]["post_block"][0], [("post_block", 0)]
    places.append(("post_block", 1))
    _, seen = Reference(DEMO_MODEL).run(tokens, places, [Addition(places[0], vector, 0, None)])
    for layer, place in enumerate(places):
        found = output.activations["post_block"][layer]
        assert found.positions.tolist() == list(range(len(tokens)))
        assert error_of(found.tensor, seen[place]) < 1e-4


def test_a_profiler_starts_and_stops_while_requests_are_steered(llm, traces):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **STEERED)
    between = {1: llm.start_profile, 3: llm.stop_profile, 5: llm.start_profile, 6: llm.stop_profile}
    output, tokens = stepped(llm, params, between)
    assert_as_steered(output, tokens)
    assert len(output.outputs[0].token_ids) == 8
    assert len(list(traces.glob("*.pt.trace.json*"))) == 2
