"""Adapters: rows belong to the request, and to the adapter, that they were computed for."""

from __future__ import annotations

import pytest
import torch
from adapters import merge, save_adapter
from tiny_engines import TINY_ENGINE
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.lora.request import LoRARequest

from engine.asking import RELATIVE, greedy, prompts_of
from engine.modes import Reader
from engine.reference import (
    HIDDEN,
    LAYERS,
    Addition,
    GatedChange,
    PatchedRow,
    Reference,
    save_tiny_model,
)
from tllm import LLM, SamplingParams, stores
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.consumers.esamp.config import ESampConsumerConfig
from tllm.consumers.esamp.consumer import ESampConsumer
from tllm.consumers.lens import LensConsumer
from tllm.consumers.probe import ProbeConsumer
from tllm.ports import ResidualStream

ON_GPU = torch.cuda.is_available()
VECTOR = 5 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(21))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama: as of most models, adapters may change its LM head."""
    path = tmp_path_factory.mktemp("tiny-llama")
    return str(save_tiny_model(path, LlamaConfig, LlamaForCausalLM))


@pytest.fixture(scope="module")
def adapter(llama, tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapter"), llama, 3)


@pytest.fixture(scope="module")
def lora_engine(llama):
    if ON_GPU:
        pytest.skip("on a GPU vLLM's kernels take no adapters in float32")
    return LLM(llama, max_num_batched_tokens=24, enable_lora=True, max_lora_rank=8, **TINY_ENGINE)


def test_records_are_of_the_adapter_that_computed_them(llama, lora_engine, adapter, tmp_path):
    """They were all of the model, and rows of several adapters came in one batch."""
    root = tmp_path / "store"
    lora_engine.register_consumer(FilesystemConsumer(root=str(root)))
    lora = LoRARequest("adapter", 1, str(adapter))
    for name, given in (("with", lora), ("without", None)):
        capture = {"filesystem": {"request_id": name, "hooks": {"post_block": [1]}}}
        [output] = lora_engine.generate(
            [{"prompt_token_ids": [7, 8, 9]}],
            greedy(2, capture=capture),
            lora_request=given,
            use_tqdm=False,
        )
        assert output.capture_results["filesystem"].status == "ok"
    lora_engine.unregister_consumer("filesystem")
    store = stores.open(root)
    base = store.record("without").model
    assert store.record("with").model == f"{base}+adapter"
    with pytest.raises(stores.StoreError, match=r"are of the models \[.*\+adapter'\]"):
        store.batches("post_block", 1)
    [batch] = store.filter(model=f"{base}+adapter").batches("post_block", 1)
    assert set(batch.request_ids) == {"with"}


def test_rows_belong_to_the_request_and_its_adapter(llama, lora_engine, adapter):
    """One adapter a batch: vLLM 0.32 on a CPU gives a batch's adapter to its plain requests too."""
    read = ResidualStream.read(layer=LAYERS - 2, site="post_block", role="hidden")
    llm = lora_engine
    llm.register_consumer(Reader("reader", read))
    prompts = [list(range(10, 40)), [7, 8, 9]]
    plain, changed = Reference(llama), Reference(llama)
    merge(adapter, changed.model)
    for lora, reference in ((LoRARequest("adapter", 1, str(adapter)), changed), (None, plain)):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False),
            lora_request=lora,
            use_tqdm=False,
        )
        for output, prompt in zip(outputs, prompts, strict=True):
            tokens = [*prompt, *output.outputs[0].token_ids]
            with torch.no_grad():
                states = reference.model(torch.tensor([tokens]), output_hidden_states=True)
            rows = output.consumer_results["reader"].payload
            assert rows.positions.tolist() == list(range(len(tokens) - 1))
            expected = states.hidden_states[LAYERS - 1][0, :-1]
            assert (rows.values - expected).abs().max() < 2e-5 * expected.abs().max()
            likeliest = states.logits[0, len(prompt) - 1 : -1].argmax(-1)
            assert likeliest.tolist() == list(output.outputs[0].token_ids)

    steered = SamplingParams(
        max_tokens=6,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        steering_vectors={"post_block": {1: VECTOR}, "attn_heads": {2: VECTOR}},
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        steered,
        lora_request=LoRARequest("adapter", 1, str(adapter)),
        use_tqdm=False,
    )
    for output, prompt in zip(outputs, prompts, strict=True):
        places = ("post_block", 1), ("attn_heads", 2)  # what the adapter changes reads the heads
        expected = changed.greedy(prompt, 6, [Addition(place, VECTOR) for place in places])
        assert list(output.outputs[0].token_ids) == expected

    probe = {"hook": "pre_attn", "layer": 1, "vector": VECTOR}
    entry = {"vector": VECTOR, "when": {"probe": probe, "above": 0.0, "name": "gate"}}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        greedy(6, steering_vectors={"post_block": {1: entry}}),
        lora_request=LoRARequest("adapter", 1, str(adapter)),
        use_tqdm=False,
    )
    for output, prompt in zip(outputs, prompts, strict=True):
        change = GatedChange(
            ("post_block", 1),
            lambda h: h + VECTOR,
            [(("pre_attn", 1), lambda h: h @ VECTOR)],
            lambda scores: (scores[0] > 0).float(),
        )
        assert list(output.outputs[0].token_ids) == changed.greedy(prompt, 6, gated=[change])
        signal, [scores] = output.outputs[0].signals["gate"], change.scores
        assert signal.scores == pytest.approx(scores[signal.positions].numpy(), rel=1e-4, abs=5e-3)
    llm.clear_consumers()


def test_adapters_take_turns_at_prompts_that_are_cached(llama, lora_engine, adapter, tmp_path):
    """Requests with steering, capture, both and neither; each adapter begins and comes again."""
    other = save_adapter(tmp_path, llama, 5)
    references = [Reference(llama) for _ in range(3)]
    merge(adapter, references[0].model)
    merge(other, references[1].model)
    loras = [LoRARequest("one", 1, str(adapter)), LoRARequest("two", 2, str(other)), None]
    [prompt] = prompts_of([70])
    place = ("post_block", LAYERS - 2)
    capture = {"memory": {"hooks": {"post_block": [LAYERS - 2]}, "positions": "all"}}
    steering = {"post_block": {1: VECTOR}}
    asked = [
        {"capture": c, "steering_vectors": s} for c in (None, capture) for s in (None, steering)
    ]
    for turn in (0, 1, 2, 0):
        outputs = lora_engine.generate(
            [{"prompt_token_ids": prompt}] * len(asked),
            [greedy(4, **each) for each in asked],
            lora_request=loras[turn],
            use_tqdm=False,
        )
        for output, each in zip(outputs, asked, strict=True):
            additions = [Addition(("post_block", 1), VECTOR)] if each["steering_vectors"] else []
            [sample], reference = output.outputs, references[turn]
            assert list(sample.token_ids) == reference.greedy(prompt, 4, additions)
            if each["capture"]:
                tokens = [*prompt, *sample.token_ids][:-1]
                rows = sample.activations["post_block"][LAYERS - 2].tensor
                expected = reference.run(tokens, [place], additions)[1][place]
                assert (rows - expected).norm() < RELATIVE * expected.norm()


def swept(source: Reference, base: Reference, clean, corrupt, layers, answers) -> torch.Tensor:
    """`[layers, positions]`, differences of two logits: rows of `post_block` of one model's run of
    the clean prompt, put into another's run of the corrupt one."""
    places = [("post_block", layer) for layer in layers]
    _, states = source.run(clean, places)
    found = [
        base.run(corrupt, patches=[PatchedRow(place, p, states[place][p])])[0][-1]
        for place in places
        for p in range(len(corrupt))
    ]
    right, wrong = torch.stack(found)[:, list(answers)].unbind(1)
    return (right - wrong).reshape(len(places), len(corrupt))


def test_a_sweep_with_an_adapter_is_one_of_the_merged_weights(
    llama, lora_engine, adapter, tmp_path
):
    """Adapters of layers, and of the head, from which the measured logits come."""
    head, answers = save_adapter(tmp_path / "head", llama, 7, head=True), (5, 9)
    plain, changed, other = Reference(llama), Reference(llama), Reference(llama)
    merge(adapter, changed.model)
    merge(head, other.model)
    [clean] = prompts_of([20], seed=8)
    corrupt = [*clean[:4], clean[4] % 250 + 1, *clean[5:]]
    asked = {"hooks": "post_block", "layers": [0, 2], "metric": "logit_diff", "answers": answers}
    # The head's last: vLLM 0.32 on a CPU gives it to what comes without one, too.
    loras = [LoRARequest("one", 1, str(adapter)), None, LoRARequest("head", 3, str(head))]
    for lora, reference in zip(loras, (changed, plain, other), strict=True):
        sweep = lora_engine.patching.sweep(clean, corrupt, **asked, lora_request=lora)
        expected = swept(reference, reference, clean, corrupt, [0, 2], answers)
        assert (sweep.tensor - expected)[:, 4:].abs().max() < 2e-3 < expected[:, 4:].std()
    assert lora_engine.patching.kept() == {}
    with pytest.raises(ValueError, match="'lost' cannot be loaded from"):
        lora_engine.patching.sweep(
            clean, corrupt, **asked, lora_request=LoRARequest("lost", 4, str(tmp_path / "none"))
        )
    again = lora_engine.patching.sweep(clean, corrupt, **asked, lora_request=loras[0])
    expected = swept(changed, changed, clean, corrupt, [0, 2], answers)
    assert (again.tensor - expected)[:, 4:].abs().max() < 2e-3


def test_a_run_with_an_adapter_is_a_source_for_requests_without(llama, lora_engine, adapter):
    """What fine-tuning changed is found by putting its rows into the model that it began with."""
    plain, changed = Reference(llama), Reference(llama)
    merge(adapter, changed.model)
    [prompt], place = prompts_of([20], seed=9), ("post_block", 1)
    lora = LoRARequest("one", 1, str(adapter))
    run = lora_engine.patching.run(prompt, hooks=place[0], layers=place[1], lora_request=lora)
    entry = {"hook": place[0], "layer": place[1], "positions": [-1], "source": {"run": run}}
    for positions in ([-1], list(range(20))):
        [output] = lora_engine.generate(
            {"prompt_token_ids": prompt},
            greedy(1, patch=[entry | {"positions": positions}], logprobs=3),
            use_tqdm=False,
        )
        rows = changed.run(prompt, [place])[1][place]
        patches = [PatchedRow(place, p % 20, rows[p]) for p in positions]
        expected = plain.run(prompt, patches=patches)[0][-1].log_softmax(-1)
        for token, found in output.outputs[0].logprobs[0].items():
            assert found.logprob == pytest.approx(float(expected[token]), abs=1e-3)
    lora_engine.patching.drop(run)


@pytest.mark.skipif(
    not ON_GPU, reason="on a CPU vLLM 0.32 gives a batch's adapter to all of its requests"
)
def test_adapters_are_mixed_in_one_batch(llama, adapter, tmp_path):
    """Two and none at once, compiled and with CUDA graphs; steered and not."""
    other = save_adapter(tmp_path, llama, 5)
    references = [Reference(llama) for _ in range(3)]
    merge(adapter, references[0].model)
    merge(other, references[1].model)
    loras = [LoRARequest("one", 1, str(adapter)), LoRARequest("two", 2, str(other)), None]
    engine = TINY_ENGINE | {"enforce_eager": False, "dtype": "bfloat16"}
    llm = LLM(llama, enable_lora=True, max_loras=2, max_lora_rank=8, **engine)
    place = ("post_block", LAYERS - 2)
    capture = {"memory": {"hooks": {"post_block": [LAYERS - 2]}, "positions": "all"}}
    vectors = {"post_block": {1: VECTOR}}
    prompts = prompts_of([70, 9, 33])
    cases = [(p, which, steered) for p in prompts for which in range(3) for steered in (0, 1)]
    for _ in range(2):  # the second time with what the first left in the prefix cache
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _, _ in cases],
            [
                greedy(4, capture=capture, steering_vectors=vectors if steered else None)
                for _, _, steered in cases
            ],
            lora_request=[loras[which] for _, which, _ in cases],
            use_tqdm=False,
        )
        for output, (prompt, which, steered) in zip(outputs, cases, strict=True):
            [sample] = output.outputs
            rows = sample.activations["post_block"][LAYERS - 2].tensor.float()
            additions = [Addition(("post_block", 1), VECTOR)] if steered else []
            tokens = [*prompt, *sample.token_ids][:-1]
            errors = []
            for reference in references:
                expected = reference.run(tokens, [place], additions)[1][place]
                errors.append(float((rows - expected).norm() / expected.norm()))
            near = errors.pop(which)
            assert near < 0.05 < 0.5 < min(errors), (which, steered)  # in bfloat16


def test_what_looks_through_the_lm_head_leaves_out_adapters_that_change_it(
    llama, lora_engine, adapter, tmp_path
):
    """Where the head is the model's own, the last layer's lens is what the token is drawn from."""
    llm, head = lora_engine, save_adapter(tmp_path, llama, 7, head=True)
    plain, changed = Reference(llama), Reference(llama)
    merge(adapter, changed.model)
    llm.register_consumer(LensConsumer([LAYERS - 1], top_k=1))
    llm.register_consumer(ESampConsumer(ESampConsumerConfig(source_layer=0)))
    llm.register_consumer(ProbeConsumer(VECTOR))
    [prompt] = prompts_of([20], seed=4)

    def ask(lora):
        params = greedy(3, consumers={"lens": {}})
        [output] = llm.generate(
            [{"prompt_token_ids": prompt}], params, lora_request=lora, use_tqdm=False
        )
        [sample] = output.outputs
        return list(sample.token_ids), sample.consumer_results

    llm.collective_rpc("reload_weights")  # compares the head again; the last batch had an adapter
    for lora, reference in ((LoRARequest("one", 1, str(adapter)), changed), (None, plain)):
        tokens, results = ask(lora)
        assert tokens == reference.greedy(prompt, 3)
        assert results["lens"].payload["token_ids"].values[-3:, 0, 0].tolist() == tokens
    tokens, results = ask(LoRARequest("head", 3, str(head)))
    assert tokens != plain.greedy(prompt, 3)
    for name in ("lens", "esamp"):
        assert (results[name].status, results[name].payload) == ("error", None)
        assert "the adapter 'head' changes the LM head" in results[name].error
    assert results["probe"].status == "ok"
    llm.clear_consumers()
