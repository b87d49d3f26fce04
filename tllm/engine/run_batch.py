"""`python -m tllm.engine.run_batch`: `vllm run-batch`, whose requests pass plugins of a server.

vLLM's own prepares its handlers without plugins, and kills its engine when the file is answered.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from tllm.engine.seams import uses

_BATCH = "vllm.entrypoints.launchers.run_batch"
_FOR = "interventions in files of requests"

uses(_BATCH, "parse_args main", _FOR)
# Replaced in this command alone.
_PREPARED = "engine_client state args supported_tasks"
uses(_BATCH, "init_app_state", _FOR, takes=_PREPARED)
uses(_BATCH, "run_batch", _FOR, takes="engine_client args")
uses("vllm.plugins", "load_endpoint_plugins", _FOR, takes="supported_tasks")


def main() -> None:
    """Do what `vllm run-batch` does with the arguments of this process."""
    from prometheus_client import start_http_server
    from vllm.entrypoints.launchers import run_batch
    from vllm.plugins import load_endpoint_plugins

    prepare, answer = run_batch.init_app_state, run_batch.run_batch
    plugins: list[Any] = []

    async def with_plugins(
        engine_client: Any, state: Any, args: Any, supported_tasks: tuple[Any, ...]
    ) -> None:
        await prepare(engine_client, state, args, supported_tasks)
        plugins.extend(load_endpoint_plugins(supported_tasks))
        for plugin in plugins:
            await plugin.init_state(engine_client, state, args)

    async def to_the_end(engine_client: Any, *args: Any, **kwargs: Any) -> None:
        try:
            await answer(engine_client, *args, **kwargs)
        finally:
            for plugin in plugins:
                if hasattr(plugin, "finish"):
                    await plugin.finish()

    vars(run_batch).update(init_app_state=with_plugins, run_batch=to_the_end)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's commands do
    arguments = run_batch.parse_args()
    if arguments.enable_metrics:
        start_http_server(port=arguments.port, addr=arguments.host or arguments.url)
    asyncio.run(run_batch.main(arguments))


if __name__ == "__main__":
    main()
