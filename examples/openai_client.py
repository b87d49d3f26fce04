"""Steering, capture and a module by HTTP, with OpenAI's own client.

tllm serve Qwen/Qwen2.5-0.5B-Instruct --port 8000
python examples/openai_client.py --layer 12
"""

from __future__ import annotations

import base64
from typing import Annotated, Any

import httpx
import numpy as np
import openai
import typer


def rows_of(tensor: dict[str, Any]) -> np.ndarray:
    """A tensor of a response, `[rows, hidden]`; bfloat16 as float32."""
    data = base64.b64decode(tensor["data"])
    if tensor["dtype"] == "bfloat16":
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tensor["shape"])
    return np.frombuffer(data, tensor["dtype"]).reshape(tensor["shape"])


def main(
    url: Annotated[str, typer.Option(help="The server.")] = "http://localhost:8000",
    layer: Annotated[int, typer.Option(help="Where to capture and to steer.")] = 2,
    strength: Annotated[float, typer.Option(help="Of the steering.")] = 4.0,
    admin_key: Annotated[str, typer.Option(help="The server's, if it has one.")] = "",
) -> None:
    """Capture a happy and a sad prompt, and steer along the difference of their last rows."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    where = {"memory": {"hooks": {"post_block": [layer]}, "positions": "last_prompt"}}

    def last_row(prompt: str) -> np.ndarray:
        answer: Any = client.completions.create(
            model=model, prompt=prompt, max_tokens=1, extra_body={"capture": where}
        )
        result = answer.capture_results["memory"]
        return rows_of(result["payload"]["post_block"][str(layer)]["tensor"])[-1]

    direction = last_row("He was so happy and glad") - last_row("He was so sad and angry")
    vector = (strength * direction / np.linalg.norm(direction)).tolist()
    spec = {"post_block": {str(layer): vector}}
    httpx.post(
        f"{url}/v1/steering/modules/register",
        json={"name": "happy", "spec": spec},
        headers={"X-Admin-Api-Key": admin_key},
    ).raise_for_status()
    for name in (model, f"{model}:happy"):
        answer = client.completions.create(
            model=name, prompt="One day", max_tokens=24, temperature=0
        )
        print(f"{name}: {answer.choices[0].text}")


if __name__ == "__main__":
    typer.run(main)
