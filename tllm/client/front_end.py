"""The user's half: what every front end does with consumers and requests.

`Client` and its parts do no input or output themselves. What takes answers of the workers is
written as steps (`tllm.client.calls`), which `LLM`, `AsyncLLM` and what is attached to an engine of
vLLM's drive.
"""

from __future__ import annotations

from collections.abc import Iterable

from tllm.client.admission import RequestAdmission
from tllm.client.answers import SharedFolder
from tllm.client.consumer_uses import ConsumerUses
from tllm.client.held import HeldByWorkers
from tllm.client.prompt_check import PromptCheck
from tllm.client.registrations import Registrations
from tllm.client.result_gathering import ResultGathering
from tllm.client.vector_uploads import VectorUploads
from tllm.consumers.base import Consumer


class Client:
    """One front end of an engine, as the parts that it has.

    Args:
        consumers: to be registered as soon as the workers are asked anything.
        capturing: ids of those whose results are capture results.
        front_ends: how many share the engine's workers.
        workers: of each data-parallel replica.

    Attributes:
        shared: the folder in which the workers leave answers.
        registered: what is registered with the engine.
        held: what the workers hold for requests that run.
        uploads: brings the workers what steers requests.
        uses: finds what consumers have to do with a request.
        prompts: checks requests whose prompt is processed.
        admission: makes requests ready.
        gathering: puts results on outputs.
    """

    def __init__(
        self,
        consumers: Iterable[Consumer] = (),
        capturing: Iterable[str] = (),
        *,
        front_ends: int = 1,
        workers: int | None = None,
    ) -> None:
        self.shared = SharedFolder()
        self.registered = Registrations(
            consumers, capturing, self.shared, front_ends=front_ends, workers=workers
        )
        self.held = HeldByWorkers()
        self.uploads = VectorUploads(self.registered, self.held)
        self.uses = ConsumerUses(self.registered)
        self.prompts = PromptCheck(self.registered.patches)
        self.admission = RequestAdmission(
            self.registered, self.held, self.uploads, self.uses, self.prompts
        )
        self.gathering = ResultGathering(self.registered)
