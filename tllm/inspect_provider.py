"""Inspect's model provider: `inspect eval TASK --model tllm/MODEL -M steering=happy.gguf`.

It talks to `tllm serve`, which it starts if no server is named. Of tLLM's it imports only what is
plain Python, so a machine that only evaluates needs neither vLLM nor torch.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import anyio
from inspect_ai.model import GenerateConfig, ModelCall, ModelOutput, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI

from tllm.request_fields import FIELDS

_RESULTS = ("capture_results", "consumer_results")
_START = [sys.executable, "-c", "from tllm.cli import app; app()", "serve"]


@modelapi(name="tllm")
class TLLMAPI(OpenAICompatibleAPI):
    """Chats with a model that is steered, captured from, and read by consumers.

    A sample's own fields are in its `GenerateConfig(extra_body=...)`, and come before those given
    here. Results are in `ModelOutput.metadata`, as the server's answer has them: those of the first
    choice, and of all choices in `samples`.

    Args:
        model_name: as the server serves it, or what a server is started with.
        base_url: of a server that runs, with `/v1`; else `TLLM_BASE_URL`, else one is started.
        api_key: of the server; else `TLLM_API_KEY`.
        steering: the name of a registered module, or, for a server that is started here, a file.
        strength: what the module's vectors are multiplied with.
        start_timeout: seconds to wait for a server that is started here.
        more: fields of requests (`tllm.request_fields`); arguments of Inspect's client (`stream`,
            `emulate_tools`, ...); and options of `tllm serve`, with `_` for `-`.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 -- as Inspect's own
        steering: str | None = None,
        strength: float = 1.0,
        start_timeout: float = 1200.0,
        **more: Any,
    ) -> None:
        self._asked = {name: more.pop(name) for name in FIELDS if name in more}
        theirs = {name: more.pop(name) for name in _OF_THE_CLIENT if name in more}
        url = base_url or os.environ.get("TLLM_BASE_URL")
        self._server: StartedServer | None = None
        self._url_to_try = url
        if url is None:
            self._server = StartedServer(model_name, steering, more, start_timeout)
            url = f"{self._server.url}/v1"
        else:
            _check_running(url, steering, more)
        if steering is not None:
            self._asked["steering_name"] = [module_name(steering), strength]
        super().__init__(
            model_name,
            base_url=url,
            api_key=api_key or os.environ.get("TLLM_API_KEY", "none"),
            config=config,
            service="tllm",
            **theirs,
        )

    def service_model_name(self) -> str:
        """The model as the server knows it."""
        return str(self.model_name)

    def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
        """Arguments of the request, with our fields in its body."""
        params: dict[str, Any] = super().completion_params(config, tools)
        params["extra_body"] = self._asked | (params.get("extra_body") or {})
        return params

    def resolve_stream(self, config: GenerateConfig) -> bool:
        """Answers with results are not streamed: Inspect's reader of streams would drop them."""
        asked = self._asked | (config.extra_body or {})
        if asked.get("capture") or asked.get("consumers"):
            return False
        return bool(super().resolve_stream(config))

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As Inspect's, with results in the output's metadata."""
        if self._server is not None:
            await anyio.to_thread.run_sync(self._server.wait)
        elif self._url_to_try is not None:
            await anyio.to_thread.run_sync(_check_answers, self._url_to_try, self.model_name)
            self._url_to_try = None
        answer = await super().generate(*args, **kwargs)
        if isinstance(answer, tuple):
            output, call = answer
            if isinstance(output, ModelOutput):
                _put_results(output, call)
        return answer

    async def aclose(self) -> None:
        """Close the client, and end a server that was started here."""
        await super().aclose()
        if self._server is not None:
            await anyio.to_thread.run_sync(self._server.stop)


_OF_THE_CLIENT = ("stream", "emulate_tools", "responses_api", "strict_tools", "client_timeout")


class StartedServer:
    """A server of this process, which ends with it.

    It starts when it is first waited for: Inspect also makes a model to look up what it is called,
    beside the one that is asked.
    """

    def __init__(
        self, model: str, steering: str | None, options: Mapping[str, Any], timeout_s: float
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._timeout_s = timeout_s
        command = [*_START, model, "--host", "127.0.0.1", "--port", str(port)]
        if steering is not None:
            if not Path(steering).is_file():
                raise ValueError(
                    f"steering={steering!r} is no file; give one, or the base_url of a server "
                    "where a module of that name is registered"
                )
            command += ["--steering-module", f"{module_name(steering)}={steering}"]
        self._command = [*command, *flags(options)]
        self._starts = threading.Lock()
        self._started: tuple[subprocess.Popen[bytes], Path] | None = None
        self._until = float("inf")
        self._end: weakref.finalize[..., StartedServer] | None = None

    def stop(self) -> None:
        """End it, if it was started."""
        if self._end is not None:
            self._end()

    def _start(self) -> tuple[subprocess.Popen[bytes], Path]:
        """Its process and its log, from now on or before."""
        with self._starts:
            if self._started is None:
                path = Path(tempfile.mkdtemp(prefix="tllm-inspect-")) / "server.log"
                with path.open("wb") as log:
                    process = subprocess.Popen(self._command, stdout=log, stderr=log)
                self._until = time.monotonic() + self._timeout_s
                self._end = weakref.finalize(self, _stop, process, path.parent)
                self._started = process, path
            return self._started

    def wait(self) -> None:
        """Start it, if it was not, and wait until it answers."""
        process, log = self._start()
        while process.poll() is None and time.monotonic() < self._until:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    self._until = float("inf")
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        assert self._end is not None
        self._end.detach()  # whoever reads the message may want the whole log
        _stop(process)
        last = log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"tllm serve does not answer; the end of {log}:\n{last}")


def module_name(steering: str) -> str:
    """The name that a file's module is registered under: the file's own, without its ending, and
    with hyphens for the signs that end a name on the command line."""
    return Path(steering).stem.replace("=", "-") if Path(steering).is_file() else steering


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options of `tllm serve` as arguments of its command line."""
    found = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            for each in value if isinstance(value, (list, tuple)) else [value]:
                found += [flag, str(each)]
    return found


def _check_running(url: str, steering: str | None, more: Mapping[str, Any]) -> None:
    """Refuse what only a server that is started here could do."""
    if more:
        raise ValueError(
            f"{', '.join(sorted(more))}: options of a server, but the one at {url} runs already; "
            "leave them out, or leave out base_url (TLLM_BASE_URL) to have one started"
        )
    if steering is not None and Path(steering).is_file():
        raise ValueError(
            f"steering={steering!r} is a file, and the server at {url} runs already; register the "
            "module there (--steering-module NAME=FILE), and give its name"
        )


def _check_answers(url: str, model: str) -> None:
    """Refuse the address of a server that is not there: Inspect would try again for hours."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/v1')}/health", timeout=30):
            return
    except (urllib.error.HTTPError, TimeoutError):
        return  # something is there; what is wrong with it, its answers say
    except (OSError, ValueError, HTTPException) as error:
        raise RuntimeError(
            f"no server answers at {url} ({error}); start one there (tllm serve {model} --port "
            "PORT), give the base_url (TLLM_BASE_URL) of one that runs, such as "
            "http://127.0.0.1:8000/v1, or leave it out to have one started"
        ) from None


def _put_results(output: ModelOutput, call: ModelCall) -> None:
    response = call.response or {}
    choices: Any = response.get("choices") or []
    samples = [{name: each[name] for name in _RESULTS if name in each} for each in choices]
    if any(samples):
        more = {"samples": samples} if len(samples) > 1 else {}
        output.metadata = {**(output.metadata or {}), **samples[0], **more}


def _stop(process: subprocess.Popen[bytes], folder: Path | None = None) -> None:
    """End a server, and remove the folder of its log."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
