"""One server for all tests: `tllm serve` of the demo model, in processes of its own.

All of them are forked, and import nothing; `test_inspect.py` starts one with the command, as a user
does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch
from adapters import merge, save_adapter
from child_process import CommandProcess
from entry_points import declared_in
from safetensors.torch import save_file

from tests.forked_processes import ScriptProcess
from tllm.engine import launch
from tllm.server.settings import VARIABLE, ServerSettings

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "demo" / "model"
KEY = "the admin key"
_TLLM = Path(__file__).with_name("serving.py")


def feature_weights() -> dict[str, torch.Tensor]:
    """Of an autoencoder with two features."""
    drawn = torch.randn(4, 128, generator=torch.Generator().manual_seed(5))
    both = {"W_enc": drawn[:2].T.contiguous(), "b_enc": torch.tensor([0.5, -0.5])}
    return both | {"W_dec": drawn[2:].clone(), "b_dec": torch.zeros(128)}


def autoencoder(folder: Path) -> Path:
    """A folder of SAELens, of what leaves layer 1."""
    folder.mkdir()
    save_file(feature_weights(), folder / "sae_weights.safetensors")
    hook = {"hook_name": "blocks.1.hook_resid_post"}
    config = {"architecture": "standard", "d_in": 128, "d_sae": 2, "metadata": hook}
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def tuned_adapter(folder: Path) -> Path:
    """The adapter that is served as "tuned"."""
    return save_adapter(folder / "tuned", MODEL, 3)


def interventions(folder: Path) -> list[str]:
    """Arguments of `tllm serve`: an administrator, consumers, and a key that may do little."""
    probe = folder / "probe.safetensors"
    save_file({"weight": torch.tensor([1.0, *[0.0] * 126, -1.0])}, probe)
    limits = folder / "limits.json"
    little = {"rows": 20, "requests": 1, "consumers": False, "experiments": 200, "conversations": 1}
    others = {"blind": {"capture": False}, "plain": {"consumers": False}}
    limits.write_text(json.dumps({"keys": {"little": little, **others}}))
    arguments = ["--admin-api-key", KEY, "--hook-points", "all", "--limits", str(limits)]
    consumers = ["logging", f"probe:path={probe},layer=1", "lens:layers=[0,-1],top_k=3"]
    consumers += [f"filesystem:root={folder / 'store'}", "turning"]
    # It knows groups, and neither reads nor writes rows.
    consumers.append("esamp:guide=false,train=false,persist=true,rank=4")
    consumers.append(f"sae:path={autoencoder(folder / 'sae')}")
    return [*arguments, *(part for each in consumers for part in ("--consumer", each))]


def somebody_elses(folder: Path, name: str = "turning") -> str:
    """A folder for the path in which a package of a consumer is installed that is not ours."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    made = f"{name} = server.{name}:{name.title()}"
    (info / "entry_points.txt").write_text(f"[tllm.consumers]\n{made}")
    return str(ROOT / "tests")


def flags_of_the_guide() -> list[str]:
    """What the guide gives to `vllm serve`, on a CPU."""
    text = (ROOT / "doc" / "guides" / "serving.md").read_text()
    (block,) = re.findall(r"^VLLM_PLUGINS=tllm vllm serve MODEL(.*?)^```$", text, re.M | re.S)
    given = shlex.split(block.replace("\\\n", " "))
    (worker,) = re.findall(r"On a CPU the worker is `(.*?)`", text)
    given[given.index("--worker-cls") + 1] = worker
    return given


class Server:
    """A running server.

    Each request has a connection of its own, and so goes to either process. Certificates are not
    verified, since there are none, and reading those of this machine takes 30 ms a request.

    Args:
        more: further arguments.
        plain: whether it is vLLM's alone, with nothing of tLLM's.
        by_hand: whether it is `vllm serve` with the flags that the guide gives.

    Attributes:
        url: its address.
        key: the administrator's.
    """

    key = KEY

    def __init__(
        self, folder: Path, *more: str, plain: bool = False, by_hand: bool = False
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.plain = plain
        self.log = folder / "server.log"
        ours = interventions(folder)
        given = [] if plain else flags_of_the_guide() if by_hand else ours
        command = ["serve", str(MODEL), *given]
        command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        # Few blocks: requests that are long, and many, are preempted.
        command += ["--block-size", "32", "--num-gpu-blocks-override", "32"]
        command += ["--api-server-count", "2", *more]  # they must agree in everything
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [
                    declared_in(folder),
                    somebody_elses(folder),
                    str(ROOT),
                    os.environ.get("PYTHONPATH", ""),
                ]
            ),
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # for answers that are fetched later
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "TMPDIR": str(folder),
        }
        if plain or by_hand:
            environment["VLLM_PLUGINS"] = "tllm" if by_hand else ""
        if by_hand:
            consumers = [given for flag, given in pairwise(ours) if flag == "--consumer"]
            settings = ServerSettings(admin_api_key=KEY, consumers=tuple(consumers))
            environment[VARIABLE] = settings.model_dump_json()
        if plain:
            command = [sys.executable, "-m", launch.module(), *command]
            self.process = CommandProcess(command, environment, self.log)
        else:
            script = find_spec(launch.module()).origin if by_hand else _TLLM
            self.process = ScriptProcess(script, command, environment, self.log, forks=True)
        self.process.start()

    def wait(self) -> None:
        """Wait until it answers."""
        for _ in range(600):
            if self.process.exitcode is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", verify=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def post(self, path: str, body: object, key: str | None = KEY) -> httpx.Response:
        """POST JSON, as the administrator unless told."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"{self.url}{path}"
        return httpx.post(url, json=body, headers=headers, timeout=120, verify=False)

    def get(self, path: str, key: str | None = KEY) -> httpx.Response:
        """GET, as the administrator unless told."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=120, verify=False)

    def __enter__(self) -> Server:
        try:
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.terminate()
        self.process.join(60)
        assert self.process.exitcode is not None, "it did not end"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The server, which is stopped at the end."""
    folder = tmp_path_factory.mktemp("server")
    given = ["--enable-lora", "--lora-modules", f"tuned={tuned_adapter(folder)}"]
    with Server(folder, *given) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's own client."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


@pytest.fixture(scope="session")
def model():
    """The same model in transformers, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    return loaded.eval(), AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def tuned(model, tmp_path):
    """The model in transformers, with the adapter added to its weights; taken off again."""
    loaded, _ = model
    weights = [layer.self_attn.o_proj.weight for layer in loaded.model.layers]
    before = {weight: weight.data for weight in weights}
    merge(tuned_adapter(tmp_path), loaded)
    yield model
    for weight, data in before.items():
        weight.data = data
