"""For a server that a command starts: its processes are forked from one that has imported vLLM.

An interpreter imports this first when its folder is on PYTHONPATH. Of tLLM nothing is imported.
"""

import multiprocessing.context as contexts
from multiprocessing import forkserver

from tests.forked_processes import OF_VLLM, ForkedContext

forkserver.set_forkserver_preload([*OF_VLLM, "vllm.entrypoints.openai.api_server"])
contexts._concrete_contexts["spawn"] = ForkedContext()
