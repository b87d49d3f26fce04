"""`python streaming.py MODEL OUTPUT`: `AsyncLLM` as a server would use it; saves what came back."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from tiny_engines import SHARE
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind

from engine.ahead import scheduling_ahead
from engine.modes import Reader, vectors
from engine.reference import HIDDEN
from tllm import AsyncLLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.engine.shutdown import Shutdown
from tllm.ports import ConsumerFlow, RequestMeta, ResidualStream

READ = ResidualStream.read(layer=1, site="post_block", role="hidden")
TURNS = [[5, 6, 7, 8], [30, 31, 32]]
"""What the user of a streaming session says, one after the other."""
ANSWER = 2
"""Tokens of the answer to each."""
CAPTURE = {
    "memory": {"hooks": {"post_block": [1]}, "positions": {"token_ids": [5, 6, 30]}},
    "filesystem": {"hooks": {"post_block": [1]}},
}
"""What is captured of the session."""
LONGER, STOPPED_AFTER = 6, 3
"""Tokens of the answers of a session, and where its last one is stopped by a token."""
STOPPED = {"memory": {"hooks": {"post_block": [1]}}, "filesystem": {"hooks": {"post_block": [1]}}}
LATER = {"memory": {"hooks": {"post_block": [1]}, "positions": [0, 6]}}
"""Of a session, a token that its first input does not reach."""
STEERED = [40, 41, 42, 43]
"""Prompt of two requests, steered globally and by a module too."""
SAMPLED = list(range(60, 69))
"""Prompt of requests whose samples end one after the other."""
ALWAYS = {
    "probe": {"hook": "post_block", "layer": 1, "vector": [1.0] * HIDDEN},
    "above": -1e9,
    "name": "always",
}
"""A condition that holds for every row."""
REMEMBERED = {"post_block": {2: {"vector": [1.0] * HIDDEN, "when": {**ALWAYS, "scope": "rest"}}}}
BURST = (0.5, 0.75, 1, 1.25, 1.5)
"""How much of a vector requests that come together have."""
ENDED_AFTER = 3
"""Tokens before which it does not end a sample."""


class Parting(Consumer):
    """Takes a while to make a file when it stops."""

    consumer_id = "parting"

    def __init__(self, path):
        self.path = path

    def flows(self):
        return []

    def stop(self):
        time.sleep(1)
        self.path.touch()


class Writing(Consumer):
    """Adds to rows."""

    consumer_id = "writing"

    def flows(self):
        return [ConsumerFlow(reads=[RequestMeta.read()], writes=[ResidualStream.write(layer=1)])]

    def consume_bundle(self, bundle, ctx):
        ctx.writer("delta").set(bundle.meta.requests, torch.ones(HIDDEN))


def params(max_tokens: int, **options) -> SamplingParams:
    chosen = {"temperature": 0, "output_kind": RequestOutputKind.CUMULATIVE, **options}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **chosen)


async def collect(engine, prompt, asked, request_id):
    """All outputs of a request."""
    return [output async for output in engine.generate(prompt, asked, request_id)]


async def turns():
    """A prompt that arrives in parts."""
    for turn in TURNS:
        yield StreamingInput(prompt={"prompt_token_ids": list(turn)})  # vLLM appends to it
        await asyncio.sleep(0.5)


async def positions_read(engine, *reads):
    """Of which tokens a session has rows whose inputs use the reader, or do not."""
    asked = [params(ANSWER, consumers={"reader": {"enabled": each}}) for each in reads]

    async def parts():
        for turn, each in zip(TURNS, asked, strict=True):
            yield StreamingInput(prompt={"prompt_token_ids": list(turn)}, sampling_params=each)
            await asyncio.sleep(0.5)

    outputs = await collect(engine, parts(), asked[0], f"reads {reads}")
    return outputs[-1].consumer_results["reader"].payload.positions.tolist()


async def refused_session(engine, first, second):
    """What a session is told whose second input asks otherwise than the request."""

    async def parts():
        for turn, options in zip(TURNS, ({}, second), strict=True):
            asked = {"sampling_params": params(ANSWER, **options)} if options else {}
            yield StreamingInput(prompt={"prompt_token_ids": list(turn)}, **asked)
            await asyncio.sleep(0.5)

    try:
        await collect(engine, parts(), params(ANSWER, **first), "refused")
    except ValueError as error:
        return str(error)
    return None


async def steered_at_once(engine, vector):
    """Tokens of three requests with the same vector, which the workers are sent late."""
    driver = engine._client.calls
    ask = driver.ask

    async def late(call):
        if call.method == "update_steering":
            await asyncio.sleep(0.3)
        return await ask(call)

    driver.ask = late
    asked = params(6, steering_vectors={"post_block": {1: vector}})
    found = await asyncio.gather(
        *(collect(engine, {"prompt_token_ids": STEERED}, asked, f"at once {i}") for i in range(3))
    )
    driver.ask = ask
    return [list(outputs[-1].outputs[0].token_ids) for outputs in found]


async def burst(engine, vector):
    """Tokens of requests that come together, each with a vector and a condition of its own, and
    how often the workers were asked what."""
    driver, asked_for = engine._client.calls, Counter()
    ask = driver.ask

    async def counted(call):
        asked_for[call.method] += 1
        return await ask(call)

    driver.ask = counted
    asked = [
        params(6, steering_vectors={"post_block": {1: {"vector": scale * vector, "when": ALWAYS}}})
        for scale in BURST
    ]
    found = await asyncio.gather(
        *(collect(engine, {"prompt_token_ids": STEERED}, a, f"b {i}") for i, a in enumerate(asked))
    )
    driver.ask = ask
    return [list(outputs[-1].outputs[0].token_ids) for outputs in found], asked_for


async def stopped_session(engine):
    """A session whose last answer ends by itself, while its next token is under way."""
    unstopped = await collect(engine, turns(), params(LONGER), "session to be stopped")
    answers = list(unstopped[-1].outputs[0].token_ids)
    asked = params(LONGER, stop_token_ids=[answers[LONGER + STOPPED_AFTER - 1]], capture=STOPPED)
    outputs = await collect(engine, turns(), asked, "stopped session")
    return {
        "unstopped": answers,
        "tokens": list(outputs[-1].outputs[0].token_ids),
        "results": outputs[-1].capture_results,
        "interrupted": await interrupted_session(engine, answers[STOPPED_AFTER - 1]),
    }


async def interrupted_session(engine, stop):
    """A session whose first answer ends by itself, while its next token is under way."""
    reduced = {"memory": {"hooks": {"post_block": [1]}, "reduction": "mean"}}
    asked = [params(LONGER, stop_token_ids=[stop], capture=each) for each in (STOPPED, reduced)]
    outputs = [
        await collect(engine, turns(), each, f"interrupted {i}") for i, each in enumerate(asked)
    ]
    return {
        "tokens": list(outputs[0][-1].outputs[0].token_ids),
        "results": outputs[0][-1].capture_results,
        "reader": outputs[0][-1].consumer_results["reader"],
        "reduced": outputs[1][-1].capture_results["memory"],
    }


def tokens_by_sample(outputs, kind):
    """What a user puts together of the outputs of a request, as vLLM has it."""
    tokens: dict[int, list[int]] = {}
    for sample in (sample for output in outputs for sample in output.outputs):
        before = tokens.get(sample.index, []) if kind is RequestOutputKind.DELTA else []
        tokens[sample.index] = [*before, *sample.token_ids]
    return tokens


async def samples_that_end_apart(engine):
    """Two samples, of which the first is stopped long before the second ends, so that no delay has
    both end in one output; one sample."""
    two = {"n": 2, "temperature": 1.0, "seed": 7}
    prompt = {"prompt_token_ids": SAMPLED}
    whole = await collect(engine, prompt, params(40, **two), "whole")
    tokens = tokens_by_sample(whole, RequestOutputKind.CUMULATIVE)
    first, other = tokens[0], tokens[1]  # each runner draws others
    alone = (n for n in range(1, 20) if first[n] not in (*first[:n], *other))
    stopped = next(alone)
    stop = first[stopped]
    found = {}
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        for options in ({**two, "stop_token_ids": [stop]}, {}):
            name = f"{kind.name} {options.get('n', 1)}"
            length = 40 if "n" in options else 6
            asked = params(length, output_kind=kind, capture=STOPPED, **options)
            outputs = await collect(engine, prompt, asked, name)
            found[name] = {
                "tokens": tokens_by_sample(outputs, kind),
                "early": [s.consumer_results for o in outputs[:-1] for s in o.outputs],
                "ended": [[s.index for s in o.outputs if s.finish_reason] for o in outputs],
                "results": {s.index: s.consumer_results for s in outputs[-1].outputs},
                "of the first": outputs[-1].consumer_results,
            }
    return {"whole": tokens, "found": found, "stopped": stopped}


async def ended_by_a_condition(engine):
    """Two samples that a condition ends, however they are streamed; a prompt that is refused."""
    prompt = {"prompt_token_ids": SAMPLED}
    found = {}
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        for name in ("stop_when", "abort_when"):
            options = {name: ALWAYS, "n": 2, "min_tokens": ENDED_AFTER, "capture": STOPPED}
            asked = params(6, output_kind=kind, **{**options, "temperature": 1.0})
            outputs = await collect(engine, prompt, asked, f"{name} {kind.name}")
            last = outputs[-1].outputs
            found[name, kind.name] = {
                "tokens": {i: len(t) for i, t in tokens_by_sample(outputs, kind).items()},
                "reasons": [(s.finish_reason, s.stop_reason) for s in last],
                "fired": [s.signals["always"].fired.tolist() for s in last],
                "captured": [
                    s.capture_results["memory"].payload["post_block"][1].positions.tolist()
                    for s in last
                ],
                "status": [(r.status, r.error) for s in last for r in s.consumer_results.values()],
            }
    return found


async def broken_samples(engine):
    """Two samples whose rows stop being finite, where no consumer is there that has results."""
    for name in list(engine.consumers):
        await engine.unregister_consumer(name)
    large = {"post_block": dict.fromkeys((1, 2, 3), [1.5e18] * HIDDEN)}
    found = {}
    for kind in RequestOutputKind:
        asked = params(6, output_kind=kind, n=2, temperature=1.0, decode_steering_vectors=large)
        outputs = await collect(engine, {"prompt_token_ids": SAMPLED}, asked, f"broken {kind.name}")
        found[kind.name] = [
            (s.finish_reason, s.stop_reason, s.consumer_results["steering"].error)
            for s in outputs[-1].outputs
        ]
    return found


async def aborted_while_merged(engine):
    """Deltas that the user merges as they come, of a request that the user aborts."""
    asked = params(200, output_kind=RequestOutputKind.DELTA, capture=STOPPED)
    tokens: list[int] = []
    merged, last = None, None
    async for last in engine.generate({"prompt_token_ids": SAMPLED}, asked, "merged"):
        tokens += last.outputs[0].token_ids
        if merged is None:
            merged = last
        else:
            merged.add(last, aggregate=True)
        if len(tokens) >= 4:
            await engine.abort("merged")
    return {"tokens": tokens, "results": last.consumer_results}


async def main(model: str, output: str) -> None:
    with scheduling_ahead():
        engine = await AsyncLLM.create(
            model,
            **SHARE,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            consumers=[Reader("reader", READ)],
            capture_consumers=[f"filesystem:root={output}.store"],
        )
    saved = {"burst": await burst(engine, vectors(HIDDEN)[0])}
    plain = [
        collect(engine, {"prompt_token_ids": prompt}, params(6), f"request-{i}")
        for i, prompt in enumerate(([10, 11, 12], list(range(40, 60))))
    ]
    saved["streamed"] = [
        {
            "steps": len(outputs),
            "tokens": list(outputs[-1].outputs[0].token_ids),
            "positions": outputs[-1].consumer_results["reader"].payload.positions.tolist(),
            "rows": outputs[-1].consumer_results["reader"].payload.values,
            "early": [o.consumer_results for o in outputs[:-1]],
        }
        for outputs in await asyncio.gather(*plain)
    ]
    seen = 0
    async for _ in engine.generate({"prompt_token_ids": [1, 2]}, params(200), "aborted"):
        seen += 1
        if seen == 3:
            await engine.abort("aborted")
            break
    other = {"memory": {"hooks": {"post_block": [0]}}}
    vector = {"steering_vectors": {"post_block": {1: [1.0] * HIDDEN}}}
    saved["refused"] = {
        "other capture": await refused_session(engine, {"capture": CAPTURE}, {"capture": other}),
        "none": await refused_session(engine, {"capture": CAPTURE}, {"seed": 1}),
        "one more": await refused_session(engine, {"seed": 1}, {"capture": other}),
        "steering": await refused_session(engine, {}, vector),
        "other steering": await refused_session(engine, vector, {"steering_module_ref": "none"}),
        "stop_when": await refused_session(engine, {"stop_when": ALWAYS}, {}),
        "conversation": await refused_session(
            engine, {"conversation": {"id": "streamed", "key": "a secret of this"}}, {}
        ),
        "scope": await refused_session(engine, {"steering_vectors": REMEMBERED}, {}),
        "deltas": await refused_session(engine, {}, {"output_kind": RequestOutputKind.DELTA}),
        "the same": await refused_session(engine, {"capture": other}, {"capture": other}),
        "the same steering": await refused_session(engine, vector, vector),
    }
    await engine.register_consumer(Writing())
    saved["refused"] |= {
        name: await refused_session(
            engine, *({"consumers": {"writing": {"enabled": each}}} for each in asked)
        )
        for name, asked in {"a writer": (False, True), "no writer": (False, False)}.items()
    }
    await engine.unregister_consumer("writing")
    session = await collect(engine, turns(), params(ANSWER, capture=CAPTURE), "session")
    saved["session"] = {
        "tokens": [list(o.outputs[0].token_ids) for o in session],
        "result": session[-1].consumer_results.get("reader"),
        "captures": session[-1].capture_results,
    }
    later = await collect(engine, turns(), params(ANSWER, capture=LATER), "later")
    saved["read by one input"] = [
        await positions_read(engine, *reads) for reads in ((True, False), (False, True))
    ]
    saved["later"] = later[-1].capture_results["memory"]
    try:
        await collect(engine, {"prompt_token_ids": [1]}, params(1, consumers={"nobody": {}}), "x")
    except ValueError as error:
        saved["refusal"] = str(error)
    saved["apart"] = await samples_that_end_apart(engine)
    saved["merged"] = await aborted_while_merged(engine)
    saved["ended"] = await ended_by_a_condition(engine)
    saved["stopped"] = await stopped_session(engine)
    early, late, shared = vectors(HIDDEN)
    saved["at once"] = await steered_at_once(engine, shared)
    await engine.steering.set({"post_block": {1: early}})
    await engine.steering.register_module("late", {"post_block": {2: late}})
    asked = (params(6), params(6, steering_module_ref="late"))
    steered = [
        collect(engine, {"prompt_token_ids": STEERED}, each, f"steered-{i}")
        for i, each in enumerate(asked)
    ]
    saved["steered"] = [
        list(outputs[-1].outputs[0].token_ids) for outputs in await asyncio.gather(*steered)
    ]
    saved["status"] = await engine.steering.status()
    try:
        wrong = params(1, steering_vectors={"post_block": {99: early}})
        await collect(engine, {"prompt_token_ids": [1]}, wrong, "wrong")
    except ValueError as error:
        saved["steering refusal"] = str(error)
    await engine.steering.clear()
    await collect(engine, {"prompt_token_ids": [3]}, params(2), "last")
    saved["stats"] = await engine.intervention_stats()
    saved["broken"] = await broken_samples(engine)
    parting = Path(f"{output}.parted")
    await engine.register_consumer(Parting(parting))
    Shutdown(engine, engine.clear_consumers)
    # As a server does that is told to end.
    await asyncio.get_running_loop().run_in_executor(None, partial(engine.shutdown, timeout=0))
    saved["parted"] = parting.exists()
    torch.save(saved, output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
