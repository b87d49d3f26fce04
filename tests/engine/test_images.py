"""Images in a chat: their tokens are named to capture, steer and patch them, at every way in."""

from __future__ import annotations

import base64
import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tiny_engines import SHARE
from vllm.exceptions import VLLMValidationError

pytest.importorskip("torchvision", reason="vLLM's multimodal models import torchvision")

IMAGE = 150
"""The id of the token that stands for a part of an image."""


def _checkpoint(folder: Path) -> None:
    """A processor for the tiny LLaVA, and its tower's weights under the names that vLLM reads."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    file = folder / "model.safetensors"
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    words = {f"w{number}": number for number in range(IMAGE)}
    words |= {"<image>": IMAGE, "<unk>": 153, "<pad>": 154, "<s>": 155, "</s>": 156}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )
    template = (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> "
        "{% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    )
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images,
        fast,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)
    fast.save_pretrained(folder)


@dataclass(frozen=True)
class Chat:
    """A text with two images among its words, and what plain `transformers` makes of it.

    Attributes:
        folder: of the checkpoint.
        messages: as users of OpenAI's interface write them.
        pixels: as the vision tower takes them; None for a text without images.
        model: of `transformers`.
        tokens: of the text, several for each image.
    """

    folder: Path
    messages: list[dict[str, Any]]
    pixels: torch.Tensor | None
    model: Any
    tokens: Sequence[int] = (1, *[IMAGE] * 4, 2, *[IMAGE] * 4, 3, 4)

    images = ((1, 2, 3, 4), (6, 7, 8, 9))

    def at(self, *items: int) -> list[int]:
        """The positions of images."""
        return [position for item in items for position in self.images[item]]

    def rows(self, layer: int = -1, change: Any = None) -> dict[int, torch.Tensor]:
        """Layer -> what leaves its block, `[tokens, hidden]`.

        Args:
            change: what is done in place to the rows that leave `layer`.
        """
        return self._computed(layer, change)[0]

    def logits(self, layer: int, change: Any) -> torch.Tensor:
        """`[vocab]`, of the token after the prompt."""
        return self._computed(layer, change)[1]

    def _computed(self, layer: int, change: Any) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        blocks = self.model.model.language_model.layers

        def hook(number: int, output: Any) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            found[number] = stream.reshape(-1, 128).clone()
            if number == layer:
                change(stream.view(-1, 128))

        handles = [
            block.register_forward_hook(lambda *call, number=number: hook(number, call[2]))
            for number, block in enumerate(blocks)
        ]
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([self.tokens]), pixel_values=self.pixels, use_cache=False
            ).logits
        for handle in handles:
            handle.remove()
        return found, logits[0, -1]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: Any) -> Chat:
    """A tiny LLaVA, and what is asked of it."""
    from oracle import families
    from PIL import Image
    from transformers import CLIPImageProcessor, LlavaForConditionalGeneration

    folder = families.save("llava", tmp_path_factory.mktemp("llava"))
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    _checkpoint(folder)
    pictures, urls = [], []
    for seed in range(2):
        noise = torch.randint(0, 255, (28, 28, 3), generator=torch.Generator().manual_seed(seed))
        pictures.append(Image.fromarray(noise.to(torch.uint8).numpy()))
        png = io.BytesIO()
        pictures[-1].save(png, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}")
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    pixels = CLIPImageProcessor(**size)(pictures, return_tensors="pt")["pixel_values"]
    first, second = ({"type": "image_url", "image_url": {"url": url}} for url in urls)
    words = [{"type": "text", "text": text} for text in ("w1", "w2", "w3 w4")]
    content = [words[0], first, words[1], second, words[2]]
    return Chat(folder, [{"role": "user", "content": content}], pixels, model)


OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "limit_mm_per_prompt": {"image": 2},
    "hook_points": "all",
}


@pytest.fixture(scope="module")
def llm(chat: Chat) -> Any:
    """An engine in this process."""
    from tllm import LLM

    return LLM(str(chat.folder), **OPTIONS, **SHARE)


def _asked(positions: Any, **more: Any) -> dict[str, Any]:
    memory = {"hooks": {"post_block": "all"}, "positions": positions}
    return {"max_tokens": 1, "temperature": 0, "capture": {"memory": memory}, **more}


def _run(llm: Any, chat: Chat, positions: Any, **more: Any) -> Any:
    from tllm import SamplingParams

    params = SamplingParams(**_asked(positions, **more))
    [output] = llm.chat(chat.messages, params, use_tqdm=False)
    assert output.prompt_token_ids == list(chat.tokens)
    return output.activations["post_block"]


def _compare(found: Any, expected: dict[int, torch.Tensor], positions: list[int]) -> None:
    for layer, rows in expected.items():
        assert found[layer].positions.tolist() == positions
        torch.testing.assert_close(
            found[layer].tensor.float(), rows[positions], rtol=1e-4, atol=1e-4
        )


def test_tokens_of_images_are_captured(llm: Any, chat: Chat) -> None:
    expected = chat.rows()
    for positions, wanted in (
        ("image", chat.at(0, 1)),
        ({"token_ids": [IMAGE]}, chat.at(0, 1)),
        ({"image": 0}, chat.at(0)),
        ({"image": [-1], "positions": [0]}, [0, *chat.at(1)]),
        ({"phase": "prompt", "exclude": {"image": "all"}}, [0, 5, 10, 11]),
        ({"phase": "prompt", "exclude": {"audio": "all"}}, list(range(12))),
    ):
        _compare(_run(llm, chat, positions), expected, wanted)


def test_tokens_of_images_are_steered(llm: Any, chat: Chat) -> None:
    vector = torch.linspace(-1, 1, 128)

    def change(stream: torch.Tensor) -> None:
        stream[chat.at(1)] += vector

    expected = chat.rows(0, change)
    entry = {"vector": vector, "positions": {"image": 1}}
    asked = {"steering_vectors": {"post_block": {0: entry}}}
    _compare(_run(llm, chat, "all_prompt", **asked), expected, list(range(12)))
    whole = {"steering_vectors": {"post_block": {0: vector}}, "steering_positions": {"image": [1]}}
    _compare(_run(llm, chat, "all_prompt", **whole), expected, list(range(12)))
    # What steers every request is for those that have an image, and leaves others alone.
    prompt = {"prompt_token_ids": [5, 6, 7]}
    plain = _of_text(llm, prompt)
    llm.steering.set({"post_block": {0: entry}})
    try:
        _compare(_run(llm, chat, "all_prompt"), expected, list(range(12)))
        assert torch.equal(_of_text(llm, prompt), plain)
    finally:
        llm.steering.clear()


def _of_text(llm: Any, prompt: Any) -> torch.Tensor:
    from tllm import SamplingParams

    params = SamplingParams(**_asked("all_prompt"))
    [output] = llm.generate([prompt], params, use_tqdm=False)
    rows: torch.Tensor = output.activations["post_block"][1].tensor
    return rows


@pytest.mark.parametrize("source", ["zero", "tensor", "noise"])
def test_tokens_of_images_are_patched(llm: Any, chat: Chat, source: str) -> None:
    from tllm.spec.patching import noise_rows

    given = {
        "zero": {"zero": True},
        "tensor": {"tensor": torch.arange(4 * 128).reshape(4, 128) / 500},
        "noise": {"noise": 0.5, "seed": 3},
    }[source]

    def change(stream: torch.Tensor) -> None:
        if source == "noise":
            stream[chat.at(0)] += torch.from_numpy(noise_rows(0.5, 3, chat.at(0), 128))
        else:
            stream[chat.at(0)] = torch.zeros(1) if source == "zero" else given["tensor"]

    patch = [{"hook": "post_block", "layer": 0, "positions": {"image": 0}, "source": given}]
    found = _run(llm, chat, "all_prompt", patch=patch)
    _compare(found, chat.rows(0, change), list(range(12)))


def test_images_of_a_truncated_prompt_stand_where_they_then_are(llm: Any, chat: Chat) -> None:
    """vLLM cuts what is beside images, and refuses to cut these."""
    from tllm import SamplingParams

    vector, cut = torch.linspace(-1, 1, 128), replace(chat, tokens=chat.tokens[1:])

    def change(stream: torch.Tensor) -> None:
        stream[5:9] += vector

    expected = cut.rows(0, change)
    entry = {"vector": vector, "positions": {"image": -1}}
    for positions, wanted in (("all_prompt", range(11)), ("image", [*range(4), *range(5, 9)])):
        params = SamplingParams(**_asked(positions, steering_vectors={"post_block": {0: entry}}))
        asked = {"use_tqdm": False, "tokenization_kwargs": {"truncate_prompt_tokens": 11}}
        [output] = llm.chat(chat.messages, params, **asked)
        _compare(output.activations["post_block"], expected, list(wanted))
    asked["tokenization_kwargs"] = {"truncate_prompt_tokens": 8}
    with pytest.raises(VLLMValidationError, match="would split or drop"):
        llm.chat(chat.messages, params, **asked)


def test_prompts_of_text_are_swept_and_those_with_images_are_refused(llm: Any, chat: Chat) -> None:
    asked = {"hooks": "post_block", "layers": [0, 1], "metric": "logit_diff", "answers": (7, 9)}
    clean, corrupt = [1, 2, 3, 4], [1, 5, 3, 4]
    sweep = llm.patching.sweep(clean, corrupt, **asked)
    rows = replace(chat, tokens=clean, pixels=None).rows()
    for index, layer in enumerate((0, 1)):
        for position in (1, 3):

            def put(stream: torch.Tensor, layer: int = layer, position: int = position) -> None:
                stream[position] = rows[layer][position]

            logits = replace(chat, tokens=corrupt, pixels=None).logits(layer, put)
            expected = float(logits[7] - logits[9])
            assert float(sweep.tensor[index, position]) == pytest.approx(expected, abs=2e-3)
    prompt = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": [None]}}
    for refused in (
        lambda: llm.patching.sweep(prompt, prompt, **asked),
        lambda: llm.patching.run(prompt, hooks="post_block"),
        lambda: llm.patching.run(chat.messages, hooks="post_block"),
    ):
        with pytest.raises(ValueError, match="give text, or a list of token ids; prompts with"):
            refused()


def test_an_item_that_the_prompt_lacks_is_refused(llm: Any, chat: Chat) -> None:
    from tllm import SamplingParams

    entry = {"vector": [1.0] * 128, "positions": "video"}
    patch = {"hook": "post_block", "layer": 0, "positions": {"image": 2}, "source": {"zero": True}}
    for asked in (
        {"capture": {"memory": {"hooks": {"post_block": [0]}, "positions": {"image": 2}}}},
        {"steering_vectors": {"post_block": {0: entry}}},
        {"patch": [patch]},
    ):
        with pytest.raises(ValueError, match=r"has no such item \(it has 2 of image\)"):
            llm.chat(chat.messages, SamplingParams(max_tokens=1, **asked), use_tqdm=False)
    with pytest.raises(ValueError, match=r"\(it has text alone\)"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(**_asked("image")), use_tqdm=False)


def test_images_that_were_encoded_elsewhere(chat: Chat, tmp_path: Path) -> None:
    """vLLM's transfer of what encoders give: rows are of what was loaded, and not computed."""
    from safetensors.torch import load_file, save_file

    from tllm import LLM, SamplingParams

    extra = {"shared_storage_path": str(tmp_path)}
    transfer = {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    more = {"ec_transfer_config": transfer | {"ec_connector_extra_config": extra}}
    llm = LLM(str(chat.folder), **OPTIONS, **SHARE, **more, num_gpu_blocks_override=64)
    _compare(_run(llm, chat, "all_prompt"), chat.rows(), list(range(12)))
    saved = list(tmp_path.rglob("*.safetensors"))
    assert len(saved) == 2, "one for each image"
    for number, file in enumerate(saved):
        rows = load_file(file)["ec_cache"]
        save_file({"ec_cache": torch.full_like(rows, number + 1)}, file)
    llm.reset_prefix_cache()
    llm.llm_engine.reset_encoder_cache()
    for again in ({}, {"steering_vectors": {"post_block": {1: [1.0] * 128}}}):
        params = SamplingParams(
            max_tokens=1,
            capture={"memory": {"hooks": {"embed": "all"}, "positions": "image"}},
            **again,
        )
        [output] = llm.chat(chat.messages, params, use_tqdm=False)
        [found] = output.activations["embed"].values()
        assert found.positions.tolist() == chat.at(0, 1)
        first, second = found.tensor[:4], found.tensor[4:]
        assert {first.unique().item(), second.unique().item()} == {1, 2}


def test_tokens_of_images_over_http(chat: Chat, tmp_path: Path) -> None:
    """An `AsyncLLM` in the server's process, which is what a program of one's own has, too."""
    command = [sys.executable, "-c", "from tllm.cli import app; app()", "serve", str(chat.folder)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "llava"]
    for name, value in OPTIONS.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    log = tmp_path / "log"
    process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        body = {"model": "llava", "messages": chat.messages, **_asked({"image": 1})}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        kept = choice["capture_results"]["memory"]
        for layer, rows in chat.rows().items():
            given = kept["payload"]["post_block"][str(layer)]["tensor"]
            found = np.frombuffer(base64.b64decode(given["data"]), given["dtype"])
            torch.testing.assert_close(
                torch.from_numpy(found.reshape(given["shape"]).copy()),
                rows[chat.at(1)],
                rtol=1e-4,
                atol=1e-4,
            )
        refused = httpx.post(f"{url}/v1/chat/completions", json=body | _asked("audio"), timeout=60)
        assert refused.status_code == 400
        assert "the prompt has no such item (it has 2 of image)" in refused.text
    finally:
        process.terminate()
        process.wait(60)
