"""What the user's process may ask of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.patch_runs import PatchRunsConsumer
from tllm.engine.conversations import Conversations
from tllm.engine.options import EngineOptions
from tllm.engine.registered import WEIGHTS, HeldGroups, Registered
from tllm.models.sites import ModelSites
from tllm.runtime.session import Session
from tllm.spec.patching import KEPT


class WorkerCalls:
    """The calls, and what front ends have registered.

    Args:
        rank: of the worker in its replica; the first one shows the version of what is registered.
    """

    def __init__(
        self, session: Session, sites: ModelSites, options: EngineOptions, rank: int
    ) -> None:
        self._session = session
        self._sites = sites
        self._options = options
        self._rank = rank
        self._registered = Registered()
        self._groups = HeldGroups(session.steering)
        self._conversations = Conversations(options.max_conversations)
        self._consumers: dict[str, str] = {}  # registration by id
        self._front_ends = 1
        # Calls that others answer as they are.
        self.change_registered = self._registered.change
        self.registered_since = self._registered.since
        self.update_steering = self._groups.put
        self.enter_conversation = self._conversations.enter
        self.forget_conversation = self._conversations.forget
        self.conversations = self._conversations.described
        self.leave_conversation = self._conversations.leave
        self.take_results = session.sequences.pop_results
        self.discard_results = session.sequences.discard_results
        self.not_steered = session.not_steered
        self.call_consumer = session.call_consumer
        self.consumer_stats = session.consumer_stats

    def close(self) -> None:
        self._registered.close()

    def attach(self, holder: str) -> dict[str, Any]:
        """A front end begins: what it must know of this engine.

        Args:
            holder: see `HeldGroups.attach`.
        """
        if self._rank == 0:
            self._registered.show()
        front_ends = self._groups.attach(holder)
        if front_ends != self._front_ends:
            self._front_ends = front_ends
            self._registered.put("front_ends", str(front_ends).encode())
        model = self._session.consumers.model
        return {
            "shared_file": self._registered.shared_file,
            "points": self._sites.points,
            "hidden_size": self._sites.hidden_size,
            "vocab_size": model.vocab_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "row_bytes": self._sites.hidden_size * model.dtype.itemsize,
            "max_value": torch.finfo(model.dtype).max,
            "max_configs": self._options.max_steering_configs,
            "max_mib": self._options.max_steering_mib,
            "max_patch_mib": self._options.max_patch_mib,
            "max_patch_host_mib": self._options.max_patch_host_mib,
            "centers_rows": model.final_norm_weight is None,
        }

    # -- what is registered ----------------------------------------------------------------------

    def register(self, consumer_id: str, payload: bytes) -> bool:
        """Add a consumer, unless one of this id is there; whether it was added.

        Args:
            payload: the consumer, pickled, first in a tuple, of which this worker makes a copy of
                its own, and last its registration.
        """
        if consumer_id in self._consumers:
            return False
        consumer, *_, registration = cloudpickle.loads(payload)
        self._session.consumers.register(consumer, registration)
        self._consumers[consumer_id] = registration
        self._registered.put(f"consumer:{consumer_id}", payload)
        return True

    def registered_consumers(self) -> dict[str, str]:
        """The registrations of the consumers that are here, by id."""
        return dict(self._consumers)

    def unregister(self, consumer_id: str | None) -> None:
        self._session.unregister(consumer_id)
        for name in sorted(self._consumers) if consumer_id is None else [consumer_id]:
            del self._consumers[name]
            self._registered.put(f"consumer:{name}", None)

    def withdraw(self, consumer_id: str, registration: str) -> None:
        """Remove a consumer that could not be registered in every worker, where it is."""
        if self._consumers.get(consumer_id) == registration:
            self.unregister(consumer_id)

    def keep_run(self, uid: str, on_host: bool = False) -> tuple[int, int] | None:
        """Keep the rows of a run that has ended, for patches; the number of its tokens, and the
        bytes taken. None where this worker has none of them."""
        taken = self._session.call_consumer(PatchRunsConsumer.consumer_id, "take", uid)
        if taken is None:
            self.keep_rows(uid, {})
            return None
        places, rows = taken
        self._session.patching.keep(uid, places, rows, on_host=on_host)
        return len(rows), rows.nbytes

    @torch.inference_mode()
    def keep_rows(
        self, uid: str, rows: Mapping[tuple[str, int | None], npt.NDArray[np.float32]]
    ) -> None:
        """Keep one row at each of some places, for patches. Where other pipeline stages have all of
        them, it is kept in mind that they were not dropped."""
        patching = self._session.patching
        here = [place for place in rows if patching.has(*place)]
        hidden = self._sites.hidden_size
        values = np.array([rows[place] for place in here], np.float32).reshape(1, -1, hidden)
        patching.keep(uid, here, torch.from_numpy(values).to(patching.device, patching.dtype))

    def drop_rows(self, uid: str) -> None:
        """Forget rows that were kept, or a run that ended and was not."""
        if PatchRunsConsumer.consumer_id in self._consumers:
            self._session.call_consumer(PatchRunsConsumer.consumer_id, "take", uid)
        self._session.patching.drop(uid)

    def drop_runs(self) -> int:
        """Forget all runs, since the weights that they were computed with are gone, and let front
        ends know, also that weights were replaced; how many runs there were."""
        self._registered.put(WEIGHTS, None)
        dropped = 0
        for key, (_, value) in self._registered.since(0).entries.items():
            if value is None or not key.startswith(KEPT):
                continue
            kept = cloudpickle.loads(value)
            if kept.kind == "run":
                self._session.patching.drop(kept.uid)
                self._registered.put(key, None)
                dropped += 1
        return dropped

    def patch_room(
        self, wanted: Mapping[tuple[str, int | None], int], on_host: bool = False
    ) -> tuple[int, int]:
        """How many rows this worker would keep for patches, and the bytes that it has for them, on
        the device or on the host.

        Args:
            wanted: how many rows at each place; those of other pipeline stages are kept there.
        """
        patching = self._session.patching
        rows = sum(count for place, count in wanted.items() if patching.has(*place))
        return rows, patching.free_bytes(on_host=on_host)

    def vectors_on_device(self) -> int:
        """How many steering vectors are kept here, for all front ends."""
        return self._groups.num_vectors

    # -- consumers -------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for all consumers. Raises `RuntimeError` for those that raised meanwhile."""
        if raised := self._session.synchronize():
            told = [f"consumer {name!r} raised in it: {error}" for name, error in raised.items()]
            raise RuntimeError(
                f"synchronize: {'; '.join(told)}. Who raised is detached; all others are done"
            )

    def stats(self) -> dict[str, Any]:
        """Counters of the worker, and what its model has."""
        points = self._sites.points
        return {
            **self._session.stats(),
            "conversations": self._conversations.count,
            "max_conversations": self._options.max_conversations,
            "model_points": points,
            "family": points.family,
            "num_layers": points.num_layers,
            "hidden_size": self._sites.hidden_size,
            "points": [point.value for point in points.points],
            "missing": points.reasons,
        }
