"""Next-token log-probabilities, sent to the process that asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.base import Consumer
from tllm.consumers.next_token_results import (
    KEPT_MIB,
    KEPT_RESULTS,
    ArrivingRows,
    DroppedResult,
    KeptResults,
    NextToken,
    ResultsByPosition,
)
from tllm.inference_mode import in_inference_mode
from tllm.ports import ConsumerContext, ConsumerFlow, Logits, PortBundle, RequestInfo, RequestResult
from tllm.shared_memory import SharedRows, is_shared_file
from tllm.spec.reading import allow_options, whole_number

HEADER = 4
"""Numbers before a row's values: the ticket (two halves), the number of values, and of ids."""

ADDRESS_WIDTH = 8
"""Numbers of a table of addresses: its `SharedRows` are read as int64 `[entries, 4]`."""

FILE_BITS = 32
"""Bits of an address that tell the row of a file; those above them tell which file."""

_FLOWS = (
    ConsumerFlow(reads=[Logits.read()], bundle_key=("engine_step_id",), delivery="device_lease"),
)
"""Made once: flows are asked for with every request."""

_SENT = {"place": (str, int, int), "address": (str, int, int, int, list)}
"""Options that say where results go, and of what kind their parts are."""

_DIFFERENT = (
    "inputs of a streamed prompt asked for different top_k or token_ids, and what is given of "
    "their tokens is one result; ask the same of every input, or give each a 'ticket'"
)

_CHUNK_BYTES = 64 * 2**20
"""Rows are normalised this much at a time: vLLM's memory profile knows nothing of us."""


def _check_sent(name: str, given: Any, kinds: Sequence[type]) -> None:
    """Refuse a place or an address that is none: workers write where it says."""
    option = f"consumers['next_token']['{name}']"
    parts = list(given) if isinstance(given, list | tuple) else []
    if [*map(type, parts)] != [*kinds]:
        raise ValueError(
            f"{option} is {given!r}; give a list of {', '.join(kind.__name__ for kind in kinds)}"
        )
    for path in [parts[0], *(parts[4] if name == "address" else ())]:
        if not is_shared_file(path):
            raise ValueError(f"{option} has the path {path!r}, which is none of `SharedRows`")
    if name == "address" and not parts[4]:
        raise ValueError(f"{option} is {given!r}, which names no file that results go to; name one")


class NextTokenConsumer(Consumer):
    """Log-softmax of the logits of the requests that ask for it, in float32 on the device. Of one
    with `structured_outputs`, that is over the tokens which these allow.

    A request asks with `SamplingParams(consumers={"next_token": options})`, for each of its tokens:

    - `top_k`: the best k only; or `token_ids`: these only. Neither: the whole vocabulary.

    Results come back with the request's output, as a `PerToken` whose values are `[rows, vocab]` or
    `[rows, len(token_ids)]`; for `top_k` a mapping with `values` and `token_ids`, both `[rows, k]`.
    Unless the request has a `ticket`, an integer that no other request has, nor another sample of
    its own (with n > 1 they get an error). Then a result is there as soon as the engine's output of
    the step is, and the next token's takes its place:

    - `place`: `[path, width, row]` of a `SharedRows` file. The row is written:
      `[HEADER + values]`, or `[HEADER + values + ids]` for `top_k`.
    - `address`, instead of ticket and place: `[path, entry, serial, width, paths]`. For a request
      that is asked again and again, so that its options stay as they are. The ticket and the place
      of a token's result are looked up, when it is computed, in an entry of a table, `SharedRows`
      of `ADDRESS_WIDTH`: int64 ticket, place (the file's number among `paths`, and `FILE_BITS`
      bits of its row) and serial. Whoever writes there another serial gets nothing for this one.
    - Without a place it stays in the worker, until `call_consumer("next_token", "pop", [tickets])`
      gives `{ticket: NextToken}`. At most `kept_results` wait there, of at most `kept_mib`; the
      oldest make room for later ones: `pop` gives a `DroppedResult` for their tickets, and the
      statistics count them.

    `call_consumer("next_token", "forget", [tickets])` forgets results that nobody will ask for, and
    returns when no write of an earlier step is under way.

    Args:
        kept_results, kept_mib: the most results that wait in the worker, and what they may take.
    """

    consumer_id = "next_token"
    on_request_only = True
    remote_methods = ("pop", "forget")

    def __init__(self, *, kept_results: int = KEPT_RESULTS, kept_mib: int = KEPT_MIB) -> None:
        self._most_kept = whole_number(kept_results, "kept_results=", 1)
        self._most_bytes = whole_number(kept_mib, "kept_mib=", 1) << 20

    def flows(self) -> Sequence[ConsumerFlow]:
        """The logits as the LM head gave them, prompts and generated tokens together."""
        return _FLOWS

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """Options as above; `ValueError` names the one that is wrong."""
        known = ("enabled", "top_k", "token_ids", "ticket", "place", "address")
        allow_options(options, known, "consumers['next_token']")
        ticket = options.get("ticket", 0)
        whole_number(ticket, "consumers['next_token']['ticket']=", 0, 2**62 - 1)
        if "place" in options and "ticket" not in options:
            raise ValueError("consumers['next_token'] has 'place' without a 'ticket'; give both")
        if "address" in options and "ticket" in options:
            raise ValueError(
                "consumers['next_token'] has 'address' and 'ticket'; give one of them, since the "
                "address tells the ticket"
            )
        for name, kinds in _SENT.items():
            if name in options:
                _check_sent(name, options[name], kinds)
        top_k = options.get("top_k")
        if top_k is not None:
            whole_number(top_k, "consumers['next_token']['top_k']=", 1)
        if top_k is not None and options.get("token_ids") is not None:
            raise ValueError(
                "consumers['next_token'] has 'top_k' and 'token_ids'; give one of them"
            )
        ids = options.get("token_ids")
        listed = isinstance(ids, (list, tuple)) and bool(ids)
        if ids is not None and not (listed and all(type(i) is int and i >= 0 for i in ids)):
            raise ValueError(
                "consumers['next_token']['token_ids'] must be a list of token ids, at least one"
            )

    def start(self, ctx: ConsumerContext) -> None:
        """Nothing is known yet of where results go."""
        self._files: dict[tuple[str, int], tuple[SharedRows, torch.Tensor, bool]] = {}
        self._tables: dict[str, npt.NDArray[np.int64]] = {}
        self._asks: dict[int, _Ask] = {}
        self._kept = KeptResults(self._most_kept, self._most_bytes)
        self._by_slot: dict[int, ResultsByPosition] = {}
        self._device = ctx.device
        self._answers = ctx.model.first_rank
        self.rows = 0
        self.bytes_out = 0
        self.bundles = 0

    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Normalise the rows that are asked for, and send them off."""
        if not self._answers:
            return
        requests, positions = bundle.meta.requests, bundle.meta.positions
        logits = bundle.entries["logits"]
        groups: dict[_RowForm, tuple[list[int], list[_Ask]]] = {}
        for row, index in enumerate(bundle.meta.request_index.tolist()):
            ask = self._ask(requests[index], logits.shape[1])
            if ask.problem:
                continue
            rows, asks = groups.setdefault(ask.form, ([], []))
            rows.append(row)
            asks.append(ask)
        self.bundles += bool(groups)
        size = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
        for form, (rows, asks) in groups.items():
            asked = _AskedRows(np.array(rows), asks, positions[rows])
            if form.paths or form.table:
                asked = asked.sent(self._table(form.table))
            if form.table:
                asked = self._within(asked, form.width)
            for begin in range(0, len(asked), size):
                self._answer(logits, form, asked.part(slice(begin, begin + size)), ctx)

    def _ask(self, request: RequestInfo, vocab: int) -> _Ask:
        """What a request asks; read from its options once."""
        known = self._asks.get(request.slot)
        if known is None or known.options is not request.options:
            known = self._asks[request.slot] = _Ask(request, vocab)
            known.problem = known.problem or self._unreachable(known, vocab)
        return known

    def _unreachable(self, ask: _Ask, vocab: int) -> str:
        """Why what a request asks cannot be sent to where it says; empty when it can."""
        form = ask.form
        try:
            table = self._table(form.table)
            files = [self._file(path, form.width)[0] for path in ask.paths]
        except ValueError as error:
            return str(error)
        if table is None and not files:
            return ""
        values = min(form.top_k, vocab) or form.num_ids or vocab
        needed = HEADER + (2 if form.top_k else 1) * values
        if form.width < needed:
            return f"the rows of {ask.paths[0]} have {form.width} numbers; {needed} are needed"
        rows = len(files[0]) if table is None else len(table)
        if not 0 <= ask.place < rows:
            return f"there is no row {ask.place} in {form.table or ask.paths[0]}, which has {rows}"
        return ""

    def _within(self, asked: _AskedRows, width: int) -> _AskedRows:
        """The same without rows whose address names a place that is not there. Their requests get
        nothing any more, and hear why."""
        assert asked.places is not None
        lengths = np.array([len(self._file(path, width)[0]) for path in asked.paths])
        files, rows = np.divmod(asked.places, 1 << FILE_BITS)
        inside = (files >= 0) & (files < len(lengths))
        inside[inside] = rows[inside] < lengths[files[inside]]
        if inside.all():
            return asked
        for i in np.flatnonzero(~inside).tolist():
            asked.asks[i].problem = (
                f"its address names row {rows[i]} of file {files[i]}, and it has {len(lengths)} "
                f"files of {lengths.tolist()} rows"
            )
        return asked.part(np.flatnonzero(inside))

    def _table(self, path: str | None) -> npt.NDArray[np.int64] | None:
        if path is not None and path not in self._tables:
            entries = SharedRows(Path(path), ADDRESS_WIDTH).values
            self._tables[path] = entries.view(np.int64)
        return None if path is None else self._tables[path]

    def _answer(
        self, logits: torch.Tensor, form: _RowForm, asked: _AskedRows, ctx: ConsumerContext
    ) -> None:
        rows = asked.rows
        first, end = int(rows[0]), int(rows[0]) + len(rows)
        # Rows that follow each other need nothing on the device to be found.
        together = np.array_equal(rows, np.arange(first, end))
        part = logits[first:end] if together else logits[ctx.upload(rows)]
        found = torch.log_softmax(part, -1, dtype=torch.float32)
        ids: torch.Tensor | None = None
        if form.top_k:
            found, chosen = found.topk(min(form.top_k, found.shape[1]))
            ids = chosen.to(torch.int32)
        elif form.num_ids:
            wanted = np.array([ask.options["token_ids"] for ask in asked.asks])
            found = found.gather(1, ctx.upload(wanted))
        self.rows += len(rows)
        if asked.tickets is None or asked.places is None:
            self._keep(asked, ArrivingRows(found, ids, ctx))
            return
        numbers = found.shape[1]
        packed = torch.empty((len(rows), form.width), dtype=torch.float32, device=self._device)
        packed[:, HEADER : HEADER + numbers] = found
        bits = packed.view(torch.int32)
        if ids is not None:
            bits[:, HEADER + numbers : HEADER + 2 * numbers] = ids
        header = np.empty((len(rows), HEADER), np.int32)
        header[:, :2] = np.ascontiguousarray(asked.tickets).view(np.int32).reshape(-1, 2)
        header[:, 2:] = numbers, 0 if ids is None else numbers
        bits[:, :HEADER] = ctx.upload(header)
        self._send(form, packed, asked.places, asked.paths)

    def _send(
        self,
        form: _RowForm,
        packed: torch.Tensor,
        places: npt.NDArray[np.int64],
        paths: Sequence[str],
    ) -> None:
        """Copy to the shared rows; neighbours in one go. The engine's output of this step is
        copied later on the same stream, so whoever has that has this."""
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        begin = 0
        for end in [*breaks.tolist(), len(places)]:
            number, first = divmod(int(places[begin]), 1 << FILE_BITS)
            target, pinned = self._file(paths[number], form.width)
            target[first : first + end - begin].copy_(packed[begin:end], non_blocking=pinned)
            begin = end
        self.bytes_out += packed.nbytes

    def _file(self, path: str, width: int) -> tuple[torch.Tensor, bool]:
        known = self._files.get((path, width))
        if known is None:
            file = SharedRows(Path(path), width)
            pinned = self._device.type == "cuda" and file.pin(self._device)
            known = self._files[path, width] = file, torch.from_numpy(file.values), pinned
        return known[1:]

    # -- results that stay in the worker --------------------------------------------------------

    def _keep(self, asked: _AskedRows, arriving: ArrivingRows) -> None:
        """On the host: nobody knows how long they stay."""
        for i, (ask, position) in enumerate(zip(asked.asks, asked.positions, strict=True)):
            if ask.ticket >= 0:
                self._kept.put(ask.ticket, arriving, i)
            else:
                kept = self._by_slot.setdefault(ask.slot, ResultsByPosition())
                kept.add(int(position), arriving, i, ask.options)

    def pop(self, tickets: Sequence[int]) -> dict[int, NextToken | DroppedResult]:
        """The last result of each ticket that this worker has, or had to drop; it is given once."""
        popped = ((ticket, self._kept.pop(ticket)) for ticket in tickets)
        return {ticket: result for ticket, result in popped if result is not None}

    def forget(self, tickets: Sequence[int] = ()) -> None:
        """Forget some results, and wait until nothing of an earlier step is being written."""
        for ticket in tickets:
            self._kept.forget(ticket)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        """The sequence's results, if they are not sent in another way."""
        ask = self._asks.pop(request.slot, None)
        if ask is not None and ask.problem:
            return RequestResult(None, "error", ask.problem)
        kept = self._by_slot.pop(request.slot, None)
        if kept is not None and kept.differ:
            return RequestResult(None, "error", _DIFFERENT)
        return None if kept is None else kept.all()

    def stop(self) -> None:
        """Let go of the shared rows."""
        self.forget()
        for file, _, pinned in self._files.values():
            if pinned:
                file.unpin(self._device)
        self._files.clear()
        self._tables.clear()

    def read_stats(self) -> Mapping[str, Any]:
        """Rows answered, bundles that had any, and bytes that were written to shared rows; results
        that wait to be taken, and those that were dropped since nobody did."""
        return {
            "rows": self.rows,
            "bundles": self.bundles,
            "bytes_out": self.bytes_out,
            "kept": len(self._kept) + len(self._by_slot),
            "kept_dropped": self._kept.dropped,
        }

    def merge_stats(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Those of the worker that answers."""
        return max(stats, key=lambda each: int(each["rows"]))


@dataclass(frozen=True)
class _RowForm:
    """What rows that are answered together have in common.

    Attributes:
        paths: of the one file that they go to, if the request names it.
        table: path of the table that has their addresses, if there is one.
    """

    paths: tuple[str, ...]
    table: str | None
    width: int
    top_k: int
    num_ids: int


class _Ask:
    """What a request asks for its next token.

    Attributes:
        ticket: -1 where it is told by an address, or where there is none.
        place: row of the file, or entry of the table.
        problem: why it gets nothing, if it does not.
    """

    def __init__(self, request: RequestInfo, vocab: int) -> None:
        options = self.options = request.options
        self.slot = request.slot
        self.ticket = int(options.get("ticket", -1))
        self.serial, table, width, self.place = 0, None, 0, -1
        self.paths: Sequence[str] = ()
        if (address := options.get("address")) is not None:
            table, self.place, self.serial, width, self.paths = address
        elif (place := options.get("place")) is not None:
            path, width, self.place = place
            self.paths = (path,)
        ids = options.get("token_ids")
        own = () if table is not None else tuple(self.paths)
        num_ids = len(ids) if ids else 0
        self.problem = ""
        if request.num_samples > 1 and (self.ticket >= 0 or self.paths):
            self.problem = (
                f"its {request.num_samples} samples have one ticket or address, and each result "
                "would take the place of another's; give each sample a request of its own"
            )
        if ids and max(ids) >= vocab:  # on a GPU, to look it up would end the process
            self.problem = f"token_ids has {max(ids)}; the vocabulary has {vocab} tokens"
        self.form = _RowForm(own, table, int(width), options.get("top_k") or 0, num_ids)


@dataclass(frozen=True)
class _AskedRows:
    """Rows of one form.

    Attributes:
        rows: `[rows]`, of the logits.
        asks: whose each is.
        positions: `[rows]`, of their tokens.
        tickets, places: `[rows]` int64, for rows that are sent: addresses as in a table.
        paths: of the files that they go to.
    """

    rows: npt.NDArray[np.int64]
    asks: Sequence[_Ask]
    positions: npt.NDArray[np.int32]
    tickets: npt.NDArray[np.int64] | None = None
    places: npt.NDArray[np.int64] | None = None
    paths: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def sent(self, table: npt.NDArray[np.int64] | None) -> _AskedRows:
        """The same with their addresses, in the order of these: neighbours are copied in one go.
        Without those that nobody waits for any more."""
        asks = self.asks
        at = np.array([ask.place for ask in asks])
        if table is None:
            tickets = np.array([ask.ticket for ask in asks])
            found = replace(self, tickets=tickets, places=at, paths=asks[0].paths)
        else:
            entries, serials = table[at], np.array([ask.serial for ask in asks])
            paths = max((ask.paths for ask in asks), key=len)  # the others were told of fewer
            found = replace(self, tickets=entries[:, 0], places=entries[:, 1], paths=paths)
            at, waits = entries[:, 1], entries[:, 2] == serials
            if not waits.all():
                found, at = found.part(np.flatnonzero(waits)), at[waits]
        return found if (np.diff(at) > 0).all() else found.part(np.argsort(at, kind="stable"))

    def part(self, which: slice | npt.NDArray[np.int64]) -> _AskedRows:
        return _AskedRows(
            self.rows[which],
            self.asks[which] if isinstance(which, slice) else [self.asks[i] for i in which],
            self.positions[which],
            None if self.tickets is None else self.tickets[which],
            None if self.places is None else self.places[which],
            self.paths,
        )
