"""Next-token log-probabilities, sent to the process that asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.base import Consumer
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    Logits,
    PerToken,
    PortBundle,
    RequestInfo,
)
from tllm.shared_memory import SharedRows

HEADER = 4
"""Numbers before a row's values: the ticket (two halves), the number of values, and of ids."""

_FLOWS = (ConsumerFlow(reads=[Logits.read()], bundle_key=("engine_step_id",)),)
"""Made once: flows are asked for with every request."""

_CHUNK_BYTES = 64 * 2**20
"""Rows are normalised this much at a time: vLLM's memory profile knows nothing of us."""


@dataclass(frozen=True)
class NextToken:
    """Log-probabilities of the token after one position.

    Attributes:
        values: float32 `[vocab]`, `[k]` or `[len(token_ids)]`.
        token_ids: int32 `[k]` for `top_k`, best first; None otherwise.
    """

    values: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int32] | None = None


class NextTokenConsumer(Consumer):
    """Log-softmax of the logits of the requests that ask for it, in float32 on the device.

    A request asks with `SamplingParams(consumers={"next_token": options})`, for each of its tokens:

    - `top_k`: the best k only; or `token_ids`: these only. Neither: the whole vocabulary.

    Results come back with the request's output, as a `PerToken` whose values are `[rows, vocab]` or
    `[rows, len(token_ids)]`; for `top_k` a mapping with `values` and `token_ids`, both `[rows, k]`.
    Unless the request has a `ticket`, an integer that no other request has. Then a result is there
    as soon as the engine's output of the step is, and the next token's takes its place:

    - `place`: `[path, width, row]` of a `SharedRows` file. The row is written:
      `[HEADER + values]`, or `[HEADER + values + ids]` for `top_k`.
    - Without a place it stays in the worker, until `call_consumer("next_token", "pop", [tickets])`
      gives `{ticket: NextToken}`.

    `call_consumer("next_token", "forget", [tickets])` forgets results that nobody will ask for, and
    returns when no write of an earlier step is under way.
    """

    consumer_id = "next_token"
    on_request_only = True
    remote_methods = ("pop", "forget")

    def flows(self) -> Sequence[ConsumerFlow]:
        """The logits as the LM head gave them, prompts and generated tokens together."""
        return _FLOWS

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """Options as above; `ValueError` names the one that is wrong."""
        known = ("enabled", "top_k", "token_ids", "ticket", "place")
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(
                f"consumers['next_token'] has unknown options {unknown}; it takes "
                f"{', '.join(known)}"
            )
        ticket = options.get("ticket", 0)
        if isinstance(ticket, bool) or not isinstance(ticket, int) or not 0 <= ticket < 2**62:
            raise ValueError(
                f"consumers['next_token']['ticket'] is {ticket!r}; give an integer from 0 below "
                "2**62"
            )
        if "place" in options and "ticket" not in options:
            raise ValueError("consumers['next_token'] has 'place' without a 'ticket'; give both")
        top_k = options.get("top_k")
        if top_k is not None and (
            isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1
        ):
            raise ValueError(f"consumers['next_token']['top_k'] is {top_k!r}; give 1 or more")
        if top_k is not None and options.get("token_ids") is not None:
            raise ValueError(
                "consumers['next_token'] has 'top_k' and 'token_ids'; give one of them"
            )
        ids = options.get("token_ids")
        if ids is not None and not (ids and all(type(i) is int and i >= 0 for i in ids)):
            raise ValueError(
                "consumers['next_token']['token_ids'] must be a list of token ids, at least one"
            )

    def start(self, ctx: ConsumerContext) -> None:
        """Nothing is known yet of where results go."""
        self._files: dict[str, tuple[SharedRows, torch.Tensor, bool]] = {}
        self._by_ticket: dict[int, tuple[_HostRows, int]] = {}
        self._by_slot: dict[int, _SequenceRows] = {}
        self._device = ctx.device
        self._answers = ctx.model.first_rank
        self.rows = 0
        self.bytes_out = 0
        self.bundles = 0

    @torch.inference_mode()
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Normalise the rows that are asked for, and send them off."""
        if not self._answers:
            return
        groups: dict[_RowForm, list[_AskedRow]] = {}
        for row, index in enumerate(bundle.meta.request_index):
            ask = _AskedRow(row, bundle.meta.requests[index], int(bundle.meta.positions[row]))
            groups.setdefault(ask.form, []).append(ask)
        logits = bundle.entries["logits"]
        self.bundles += bool(groups)
        for form, asks in groups.items():
            asks.sort(key=lambda ask: ask.shared_row)
            size = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
            for begin in range(0, len(asks), size):
                self._answer(logits, form, asks[begin : begin + size], ctx)

    def _answer(
        self,
        logits: torch.Tensor,
        form: _RowForm,
        asks: list[_AskedRow],
        ctx: ConsumerContext,
    ) -> None:
        rows = ctx.upload(np.array([ask.row for ask in asks]))
        found = torch.log_softmax(logits[rows], -1, dtype=torch.float32)
        ids: torch.Tensor | None = None
        if form.top_k:
            found, chosen = found.topk(min(form.top_k, found.shape[1]))
            ids = chosen.to(torch.int32)
        elif form.num_ids:
            wanted = np.array([ask.request.options["token_ids"] for ask in asks])
            if wanted.max() >= found.shape[1]:  # on a GPU this would end the process
                raise ValueError(
                    f"token_ids has {wanted.max()}; the vocabulary has {found.shape[1]} tokens"
                )
            found = found.gather(1, ctx.upload(wanted))
        self.rows += len(asks)
        if form.path is None:
            self._keep(asks, _HostRows(found, ids, ctx))
            return
        numbers = found.shape[1]
        packed = torch.empty((len(asks), form.width), dtype=torch.float32, device=self._device)
        packed[:, HEADER : HEADER + numbers] = found
        bits = packed.view(torch.int32)
        if ids is not None:
            bits[:, HEADER + numbers : HEADER + 2 * numbers] = ids
        tickets = np.array([ask.ticket for ask in asks], np.int64)
        header = np.empty((len(asks), HEADER), np.int32)
        header[:, :2] = tickets.view(np.int32).reshape(-1, 2)
        header[:, 2:] = numbers, 0 if ids is None else numbers
        bits[:, :HEADER] = ctx.upload(header)
        self._send(form, packed, np.array([ask.shared_row for ask in asks]))

    def _send(self, form: _RowForm, packed: torch.Tensor, rows: npt.NDArray[np.int64]) -> None:
        """Copy to the shared rows; neighbours in one go. The engine's output of this step is
        copied later on the same stream, so whoever has that has this."""
        target, pinned = self._file(form)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        begin = 0
        for end in [*breaks.tolist(), len(rows)]:
            first = int(rows[begin])
            target[first : first + end - begin].copy_(packed[begin:end], non_blocking=pinned)
            begin = end
        self.bytes_out += packed.nbytes

    def _file(self, form: _RowForm) -> tuple[torch.Tensor, bool]:
        assert form.path is not None
        known = self._files.get(form.path)
        if known is None:
            file = SharedRows(Path(form.path), form.width)
            pinned = self._device.type == "cuda" and file.pin()
            known = self._files[form.path] = file, torch.from_numpy(file.values), pinned
        return known[1:]

    # -- results that stay in the worker --------------------------------------------------------

    def _keep(self, asks: list[_AskedRow], arriving: _HostRows) -> None:
        """On the host: nobody knows how long they stay."""
        for i, ask in enumerate(asks):
            if ask.ticket >= 0:
                self._by_ticket[ask.ticket] = arriving, i
            else:
                kept = self._by_slot.setdefault(ask.request.slot, _SequenceRows())
                kept.add(ask.position, arriving, i)

    def pop(self, tickets: Sequence[int]) -> dict[int, NextToken]:
        """The last result of each ticket that this worker has; it is given once."""
        popped = {}
        for ticket in tickets:
            if ticket in self._by_ticket:
                arriving, row = self._by_ticket.pop(ticket)
                values, ids = arriving.row(row)
                popped[ticket] = NextToken(values.numpy(), None if ids is None else ids.numpy())
        return popped

    def forget(self, tickets: Sequence[int] = ()) -> None:
        """Forget some results, and wait until nothing of an earlier step is being written."""
        for ticket in tickets:
            self._by_ticket.pop(ticket, None)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        """The sequence's results, if they are not sent in another way."""
        kept = self._by_slot.pop(request.slot, None)
        return None if kept is None else kept.all()

    def stop(self) -> None:
        """Let go of the shared rows."""
        self.forget()
        for file, _, pinned in self._files.values():
            if pinned:
                file.unpin()
        self._files.clear()

    def read_stats(self) -> Mapping[str, Any]:
        """Rows answered, bundles that had any, and bytes that were written to shared rows."""
        return {
            "rows": self.rows,
            "bundles": self.bundles,
            "bytes_out": self.bytes_out,
            "kept": len(self._by_ticket) + len(self._by_slot),
        }

    def merge_stats(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Those of the worker that answers."""
        return max(stats, key=lambda each: int(each["rows"]))


@dataclass(frozen=True)
class _RowForm:
    """What rows that are answered together have in common."""

    path: str | None
    width: int
    top_k: int
    num_ids: int


class _AskedRow:
    """One row that somebody asked for."""

    def __init__(self, row: int, request: RequestInfo, position: int) -> None:
        options = request.options
        self.row = row
        self.request = request
        self.position = position
        self.ticket = int(options.get("ticket", -1))
        path, width, shared_row = options.get("place") or (None, 0, -1)
        self.shared_row = int(shared_row)
        ids = options.get("token_ids")
        self.form = _RowForm(path, int(width), options.get("top_k") or 0, len(ids) if ids else 0)


class _HostRows:
    """Results of one step, on their way to the host."""

    def __init__(
        self, values: torch.Tensor, ids: torch.Tensor | None, ctx: ConsumerContext
    ) -> None:
        self._values = ctx.to_host(values)
        self._ids = None if ids is None else ctx.to_host(ids)

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One of them, once it is there."""
        ids = None if self._ids is None else self._ids.wait()[index]
        return self._values.wait()[index], ids


class _SequenceRows:
    """Results of one sequence, in the order of their positions."""

    def __init__(self) -> None:
        self._positions: list[int] = []
        self._rows: list[tuple[_HostRows, int]] = []

    def add(self, position: int, arriving: _HostRows, row: int) -> None:
        """Add the newest."""
        self._positions.append(position)
        self._rows.append((arriving, row))

    def all(self) -> Any:
        """Every one, with its token's position."""
        positions = np.array(self._positions, np.int32)
        values, ids = zip(*(arriving.row(row) for arriving, row in self._rows), strict=True)
        found = PerToken(positions, torch.stack(values).numpy())
        if ids[0] is None:
            return found
        return {"values": found, "token_ids": PerToken(positions, torch.stack(ids).numpy())}
