"""What steers requests, on its way to the workers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from tllm.client.calls import ALONE, Steps, WorkerCall
from tllm.client.held import HeldByWorkers, Upload
from tllm.client.registrations import Registrations
from tllm.params import asked_of
from tllm.spec.groups import SteeringGroup

logger = logging.getLogger(__name__)

_BROUGHT_AT_ONCE = 2**26
"""Bytes of vectors in one call, about; more of a single request."""


class VectorUploads:
    """Brings the workers the groups of steering that they do not hold yet.

    Args:
        registered: what is known of the engine.
        held: what the workers hold for this front end.
    """

    def __init__(self, registered: Registrations, held: HeldByWorkers) -> None:
        self._registered = registered
        self._held = held
        #: Groups that requests wait for, each under a key of its own.
        self._wanted: dict[object, Sequence[SteeringGroup]] = {}

    def bring(self, groups: Sequence[SteeringGroup]) -> Steps[None]:
        """Let the workers hold groups. The caller goes on without waiting for anything else.

        A call waits for the step that is under way. So whoever comes meanwhile waits for one call
        more, which brings what all of them need. Where the workers refuse a condition of one, each
        brings its own, and hears what is wrong with it.
        """
        if self._held.has(groups):
            return
        me = object()
        self._wanted[me] = groups
        together = True
        try:
            while not self._held.has(groups):
                yield ALONE  # what is on its way is not there yet, and must not be given up again
                if self._held.has(groups):
                    return
                upload = self._upload(groups, together)
                operations = {digest: group.operations for digest, group in upload.groups.items()}
                gates = {d: group.gates for d, group in upload.groups.items() if group.gates}
                call = (self._registered.holder, upload.packed, operations, upload.released, gates)
                arrived = False
                try:
                    yield WorkerCall("update_steering", call)
                    arrived = True
                except ValueError:
                    if upload.groups.keys() <= {group.digest for group in groups}:
                        raise
                    together = False
                finally:
                    self._held.sent(upload, arrived)
        finally:
            del self._wanted[me]

    def _upload(self, groups: Sequence[SteeringGroup], together: bool) -> Upload:
        """What brings groups, and, together with them, those that others wait for."""
        brought = {group.digest: group for group in groups}
        size = 0
        for waiting in self._wanted.values() if together else ():
            size += sum(v.nbytes for group in waiting for v in group.vectors.values())
            if size <= _BROUGHT_AT_ONCE:
                brought |= {group.digest: group for group in waiting}
        facts, front_ends = self._registered.facts, self._registered.front_ends
        try:
            return self._held.upload([*brought.values()], facts, front_ends)
        except ValueError:  # there is no room for all of them
            return self._held.upload(groups, facts, front_ends)

    def expect(self, params: Iterable[Any]) -> Steps[None]:
        """Requests are about to be added: let the workers hold what steers them, in few calls."""
        if not self._registered.is_current:
            yield from self._registered.current()
        new: dict[str, SteeringGroup] = {}
        size = 0
        for each in params:
            try:
                steering = asked_of(each).steering
                groups = () if steering is None else self._registered.composer.groups(steering)
            except ValueError:  # the request will say so itself
                continue
            for group in groups:
                if group.digest not in new and not self._held.has([group]):
                    new[group.digest] = group
                    size += sum(vector.nbytes for vector in group.vectors.values())
            if size > _BROUGHT_AT_ONCE:
                yield from self._bring_if_possible([*new.values()])
                new, size = {}, 0
        if len(new) > 1:
            yield from self._bring_if_possible([*new.values()])

    def _bring_if_possible(self, groups: Sequence[SteeringGroup]) -> Steps[None]:
        """Bring groups, unless there is no room for all of them, or the workers refuse a condition
        of one: then each request brings its own, and hears what is wrong with it."""
        try:
            yield from self.bring(groups)
        except ValueError as error:
            logger.debug("steering is brought with each request: %s", error)
