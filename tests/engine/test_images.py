"""An image in a chat: rows at its tokens are those of `transformers`, and they can be selected."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

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


def _reference(folder: Path, picture: Any, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Layer -> what leaves its block, `[tokens, hidden]`, in plain `transformers`."""
    from transformers import CLIPImageProcessor, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    pixels = images(picture, return_tensors="pt")["pixel_values"]
    rows: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            rows[layer] = (output[0] if isinstance(output, tuple) else output).reshape(-1, 128)

        return hook

    for layer, block in enumerate(model.model.language_model.layers):
        block.register_forward_hook(keep(layer))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), pixel_values=pixels, use_cache=False)
    return rows


def test_rows_of_an_image_are_those_of_transformers(tmp_path: Path) -> None:
    from oracle import families
    from PIL import Image

    from tllm import LLM, SamplingParams

    folder = families.save("llava", tmp_path)
    noise = torch.randint(0, 255, (28, 28, 3), generator=torch.Generator().manual_seed(0))
    picture = Image.fromarray(noise.to(torch.uint8).numpy())
    tokens = [1, 2, 3, *[IMAGE] * 4, 4, 5]
    expected = _reference(folder, picture, tokens)
    _checkpoint(folder)
    png = io.BytesIO()
    picture.save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    content = [
        {"type": "text", "text": "w1 w2 w3"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "w4 w5"},
    ]
    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 1},
    )

    def captured(positions: Any) -> Any:
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            capture={"memory": {"hooks": {"post_block": "all"}, "positions": positions}},
        )
        [output] = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        assert output.prompt_token_ids == tokens, json.dumps(output.prompt_token_ids)
        return output.activations["post_block"]

    for positions, wanted in (("all_prompt", range(9)), ({"token_ids": [IMAGE]}, range(3, 7))):
        found = captured(positions)
        for layer, rows in expected.items():
            assert found[layer].positions.tolist() == list(wanted)
            torch.testing.assert_close(
                found[layer].tensor.float(), rows[list(wanted)], rtol=1e-4, atol=1e-4
            )
    with pytest.raises(ValueError, match="'image' is not known; give one of all"):
        captured("image")
