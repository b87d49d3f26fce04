"""`python interrupted_user.py MODEL SAID`: Ctrl-C amid a message to an engine's process.

Says `interrupted` for each in the file SAID, and whether the engine generates the same tokens then.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import zmq
from tiny_engines import TINY_ENGINE

from tllm import LLM, SamplingParams

_AFTER = 20
PROMPT = list(range(5, 35))
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


@contextmanager
def ctrl_c_between_frames() -> Iterator[None]:
    """Pressed when a message has a part that is sent and one that is not."""
    sent, code = 0, zmq.Socket.send.__code__

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal sent
        if event == "return" and frame.f_code is code and frame.f_locals["flags"] & zmq.SNDMORE:
            sent += 1
            if sent == _AFTER:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert sent >= _AFTER


def interrupted(call: Callable[[], Any], said: IO[str]) -> None:
    try:
        with ctrl_c_between_frames():
            call()
    except KeyboardInterrupt:
        print("interrupted", file=said)


def main(model: str, said: IO[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    llm = LLM(model, **TINY_ENGINE)
    prompts = [{"prompt_token_ids": PROMPT}] * 40

    def tokens() -> list[int]:
        [output] = llm.generate(prompts[:1], GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    before = tokens()
    other = [PROMPT[0] + 1, *PROMPT[1:]]
    interrupted(lambda: llm.patching.sweep(PROMPT, other, hooks="post_block", metric="kl"), said)
    assert not llm.llm_engine.has_unfinished_requests() and llm.patching.kept() == {}
    print(before == tokens(), file=said)
    interrupted(lambda: llm.generate(prompts, GREEDY, use_tqdm=False), said)
    assert not llm.llm_engine.has_unfinished_requests()
    print(before == tokens(), file=said)


if __name__ == "__main__":
    with open(sys.argv[2], "w") as file:
        main(sys.argv[1], file)
