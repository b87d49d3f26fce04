"""`python modes.py MODEL OUTPUT OPTIONS`: serve as a user would, and save what came back.

A process of its own, since the modes differ in environment variables and start other processes.
OPTIONS is JSON: arguments of `tllm.LLM`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from contextlib import suppress

import cloudpickle
import numpy as np
import torch
from tiny_engines import SHARE
from vllm.v1.engine.core_client import SyncMPClient

from tllm import LLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.consumers.lens import LensConsumer
from tllm.ports import (
    Actions,
    ConsumerFlow,
    Logits,
    Note,
    PerToken,
    ResidualStream,
    Steer,
    Stop,
)
from tllm.spec.patching import KeptRows

PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 60)), [200], list(range(30, 66)), list(range(70, 90))]
PROMPTS.append(list(range(100, 140)))
STEERED = 2
"""Of the prompts, the one that the steering consumer is enabled for."""
ASKED = 3
"""Of the prompts, the one that asks for steering itself: in all phases at layer 0, when decoding at
layer 3, and by a module, of twice its effect, at layer 2."""
PATCHED = 4
"""Of the prompts, the one into which rows of a run of another are put."""
RUN, FROM = 1, {(0, 3): 10, (3, 15): 39, (3, 21): 7}
"""That other; and by layer and position, which of its rows leaving that block."""
GATED = 5
"""Of the prompts, the one that is steered where a probe says so: at each gated layer of
`post_block`, by a probe of the `pre_attn` before it, and at the end of the model."""
GATES = (1, 3)
FAR = 4.0
TOKENS = 5
ARGUMENTS = {
    **SHARE,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 512,
}
"""Of every engine."""


def vectors(hidden: int) -> list[torch.Tensor]:
    """What is added at layers 0, 3 and 2."""
    generator = torch.Generator().manual_seed(8)
    return list(4 * torch.randn(3, hidden, generator=generator))


def asked(hidden: int) -> dict:
    """The request's keywords."""
    early, late, _ = vectors(hidden)
    return {
        "steering_vectors": {"post_block": {0: early}},
        "decode_steering_vectors": {"pre_attn": {-1: {"vector": late / 2, "scale": 2}}},
        "steering_module_ref": ("in the middle", 2.0),
    }


def gates(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The vector that is added, and that of all probes."""
    return tuple(4 * torch.randn(2, hidden, generator=torch.Generator().manual_seed(9)))


def when(hidden: int, layer: int, name: str) -> dict:
    """A condition on a probe of the stream that enters a block."""
    probe = {"hook": "pre_attn", "layer": layer, "vector": gates(hidden)[1]}
    return {"probe": probe, "above": 1.0, "name": name}


def gated(hidden: int) -> dict:
    """The keywords of the request with conditions."""
    entries = {
        layer: {"vector": gates(hidden)[0], "when": when(hidden, layer, f"gate {layer}")}
        for layer in GATES
    }
    return {"steering_vectors": {"post_block": entries}}


def across(hidden: int) -> dict:
    """A probe of the first layer decides on the third, which another pipeline stage may have."""
    entry = {"vector": gates(hidden)[0], "scale": FAR, "when": when(hidden, 0, "early")}
    return {"steering_vectors": {"post_block": {2: entry}}}


def across_remembered(hidden: int) -> dict:
    """Probes of the first two layers decide on later tokens at the others: for the rest and for the
    next one, and by the last row of the prompt and by the mean of its rows."""
    vector = gates(hidden)[0]

    def entry(layer: int, name: str, **more: object) -> dict:
        return {"vector": vector, "when": {**when(hidden, layer, name), **more}}

    both = {2: entry(0, "far rest", scope="rest"), 3: entry(1, "far next", scope="next")}
    decode = {
        2: entry(1, "far last", over="prompt_last", above=-1e9),
        3: entry(0, "far mean", over="prompt_mean", above=None, below=1.0),
    }
    return {
        "steering_vectors": {"post_block": both},
        "decode_steering_vectors": {"post_block": decode},
    }


def remembered(hidden: int) -> dict:
    """Conditions that decide on later tokens, of which each looks where its own stage is."""
    vector = gates(hidden)[0]
    rest = {**when(hidden, 1, "rest"), "scope": "rest"}
    mean = {**when(hidden, 3, "mean"), "above": None, "below": 1.0, "over": "prompt_mean"}
    entries = {1: {"vector": vector, "when": rest}, 3: {"vector": vector, "when": mean}}
    return {"steering_vectors": {"post_block": entries}}


def across_later(hidden: int) -> dict:
    """A probe of the last layer decides on later tokens at the first, on another stage."""
    given = {**when(hidden, 3, "late"), "scope": "rest"}
    return {
        "decode_steering_vectors": {"post_block": {0: {"vector": gates(hidden)[0], "when": given}}}
    }


def told(hidden: int) -> dict:
    """A turn of a conversation."""
    given = {**when(hidden, 1, "told"), "scope": "conversation"}
    entry = {"vector": gates(hidden)[0], "when": given}
    named = {"id": "a talk", "key": "secret of a talk"}
    return {"steering_vectors": {"post_block": {1: entry}}, "conversation": named}


def tokens_or_refusal(llm: LLM, prompt: list[int], asked: dict) -> list[int] | str:
    params = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        consumers={"steering": {"enabled": False}},
        **asked,
    )
    try:
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    except ValueError as error:
        return str(error)
    return list(output.outputs[0].token_ids)


MIXED = {GATED: across_remembered, 0: None, ASKED: across, STEERED: None, 1: across_remembered}
"""Prompts of one batch, and what each asks."""


def mixed(llm: LLM, hidden: int) -> list:
    """Tokens and signals of requests whose conditions look at one stage and decide on another,
    among plain ones."""
    common = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    off = {"consumers": {"steering": {"enabled": False}}}
    params = [
        SamplingParams(**common, **off, **(of(hidden) if of else {})) for of in MIXED.values()
    ]
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in MIXED]
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(each.token_ids), each.signals) for each in outputs]


def patches(run):
    """What is asked of the patched request."""
    return [
        {
            "hook": "post_block",
            "layer": layer,
            "positions": [position],
            "source": {"run": run, "positions": [row]},
        }
        for (layer, position), row in FROM.items()
    ]


def patched_too_late(llm: LLM, run: KeptRows) -> list[object]:
    """How each patch of a request ends whose run the workers do not have any more, as they would
    not where another front end has just dropped it."""
    llm.collective_rpc("tllm", args=("drop_rows", cloudpickle.dumps((run.uid,))))
    ended = []
    for patch in patches(run):
        params = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, patch=[patch]
        )
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[PATCHED]}], params, use_tqdm=False)
        [sample] = output.outputs
        ended.append((list(sample.token_ids), sample.finish_reason, sample.stop_reason))
    return ended


class Reader(Consumer):
    """Its result is the rows of one read."""

    def __init__(self, name, read):
        self.consumer_id = name
        self._read = read

    def flows(self):
        return [ConsumerFlow(reads=[self._read])]

    def start(self, ctx):
        self._rows = {}

    def consume_bundle(self, bundle, ctx):
        rows = bundle.entries[self._read.role]
        for i, (slot, position) in enumerate(
            zip(bundle.meta.slots, bundle.meta.positions, strict=True)
        ):
            self._rows.setdefault(int(slot), []).append((int(position), rows[i].cpu()))

    def on_request_finished(self, request, ctx):
        rows = self._rows.pop(request.slot, None)
        if rows is None:  # another pipeline stage has the hook point
            return None
        positions, values = zip(*rows, strict=True)
        return PerToken(np.array(positions, np.int32), torch.stack(values))


class Steering(Consumer):
    """Adds the same vector to every row at one place."""

    consumer_id = "steering"

    def flows(self):
        return [ConsumerFlow(writes=[ResidualStream.write(layer=2, role="add")])]

    def on_request_started(self, request, ctx):
        ctx.writer("add").set([request], torch.linspace(-3, 3, ctx.model.hidden_size))


class Dice(Consumer):
    """Steers each token by a number that every process would draw for itself."""

    consumer_id = "dice"
    on_request_only = True

    def flows(self):
        read = ResidualStream.read(layer=1, phase="decode")
        write = Actions.write("steer", "stop", "note")
        return [ConsumerFlow(reads=[read], writes=[write], window="next_step")]

    def decide(self, rows, ctx):
        vector = torch.linspace(-1, 1, ctx.model.hidden_size)
        for request, position in zip(rows.owners, rows.meta.positions.tolist(), strict=True):
            scale = random.uniform(3, 9)
            yield Steer(request, {"post_block": {2: {"vector": vector, "scale": scale}}}, tokens=1)
            yield Note(request, {"at": position, "scale": scale})
            if position == request.prompt_len + 2:
                yield Stop(request, reason="enough")


def diced(llm: LLM, prompt: object) -> object:
    """What a controller has made of a request; or why it is refused."""
    try:
        llm.register_consumer(Dice())
    except ValueError as error:
        return str(error)
    wanted = {"dice": {}, "steering": {"enabled": False}}
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, consumers=wanted
    )
    [output] = llm.generate([prompt], params, use_tqdm=False)
    [sample] = output.outputs
    result = sample.consumer_results["dice"]
    ended = list(sample.token_ids), sample.finish_reason, sample.stop_reason
    return *ended, result.error, result.payload.notes


def unsent(llm: LLM, prompt: object) -> int:
    """How many requests are left of one that cannot be sent to a process of the engine's own."""
    params = SamplingParams(
        max_tokens=1, detokenize=False, extra_args={"theirs": object()}, logprobs=0
    )
    for n in (1, 2):
        params.n = n
        with suppress(TypeError):
            llm.generate([prompt], params, use_tqdm=False)
    return llm.llm_engine.get_num_unfinished_requests()


READERS = {
    "early": ResidualStream.read(layer=0, site="post_block"),
    "late": ResidualStream.read(site="lm_head_in"),
    "logits": Logits.read(),
}


def main(model: str, path: str, options: str) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm = LLM(model, **ARGUMENTS, disable_log_stats=True, **json.loads(options))
    hidden = llm.llm_engine.model_config.get_hidden_size()
    llm.steering.register_module("in the middle", {"post_block": {2: vectors(hidden)[2] / 2}})
    run = llm.patching.run(PROMPTS[RUN], hooks="post_block", layers=[0, 3])
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            consumers={"steering": {"enabled": i == STEERED}},
            **(asked(hidden) if i == ASKED else gated(hidden) if i == GATED else {}),
            patch=patches(run) if i == PATCHED else None,
        )
        for i in range(len(PROMPTS))
    ]
    llm.register_consumer(Steering())
    before = llm.generate(prompts, params, use_tqdm=False)
    readers = [llm.register_consumer(Reader(name, read)) for name, read in READERS.items()]
    during = llm.generate(prompts, params, use_tqdm=False)
    for reader in readers:
        llm.unregister_consumer(reader)
    after = llm.generate(prompts, params, use_tqdm=False)
    try:
        llm.register_consumer(LensConsumer([1, -1], top_k=2))
        wanted = {"lens": {}, "steering": {"enabled": False}}
        params = SamplingParams(
            temperature=0, max_tokens=2, ignore_eos=True, detokenize=False, consumers=wanted
        )
        [looked] = llm.generate(prompts[:1], params, use_tqdm=False)
        lens = looked.consumer_results["lens"].payload
    except ValueError as error:
        lens = str(error)
    mixed_up = mixed(llm, hidden)
    given = across, across_later, remembered, told, told
    far = [tokens_or_refusal(llm, PROMPTS[GATED], of(hidden)) for of in given]
    probe = {"hook": "post_block", "layer": 1, "vector": [1.0] * hidden}
    always = {"probe": probe, "above": -1e9, "name": "always"}
    off = {"consumers": {"steering": {"enabled": False}}}
    params = SamplingParams(
        temperature=0, min_tokens=3, ignore_eos=True, detokenize=False, stop_when=always, **off
    )
    refused = SamplingParams(temperature=0, max_tokens=4, abort_when=always, **off)
    ended = []
    for output in llm.generate([prompts[0], prompts[GATED]], [params, refused], use_tqdm=False):
        [sample] = output.outputs
        fired = sample.signals["always"].fired.tolist()
        ended.append((list(sample.token_ids), sample.finish_reason, sample.stop_reason, fired))
    saved = {
        "mixed": mixed_up,
        "lens": lens,
        **dict(
            zip(("across", "across later", "remembered", "told", "told again"), far, strict=True)
        ),
        "signals": [o.outputs[0].signals for o in during],
        "ended": ended,
        "unsent": unsent(llm, prompts[0]),
        "diced": diced(llm, prompts[0]),
        "patched too late": patched_too_late(llm, run),
        "tokens": [[list(o.outputs[0].token_ids) for o in run] for run in (before, during, after)],
        "errors": [r.error for o in during for r in o.consumer_results.values() if r.error],
        "rows": [
            {
                name: (result.payload.positions.tolist(), result.payload.values)
                for name, result in o.consumer_results.items()
                if name != "signals"
            }
            for o in during
        ],
        "stats": llm.intervention_stats(),
        "dead": killed(llm) if isinstance(llm.llm_engine.engine_core, SyncMPClient) else None,
    }
    torch.save(saved, path)


def killed(llm: LLM) -> str:
    """Kill the engine's process while it is asked something; what the caller sees."""
    [process] = llm.llm_engine.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGSTOP)  # it would answer otherwise
    threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
    try:
        llm.intervention_stats()
    except Exception as error:
        return type(error).__name__
    return "nothing"


if __name__ == "__main__":
    main(*sys.argv[1:])
