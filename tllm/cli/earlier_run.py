"""What a store has of a job of `tllm capture` from an earlier run of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tllm.stores
from tllm.spec.capture import CaptureSpec
from tllm.spec.layers import Layers
from tllm.spec.selection import Intervals, Selection, intersected

REDUCED_POSITIONS = "reduced_positions"
"""In a record's metadata: the positions that were asked for. A reduced row does not say which rows
it was made of."""

ASKED_LAYERS = "asked_layers"
"""In a record's metadata, by hook point: the layers that were asked for, as text. Which ones are
the last, or all, a store does not know."""

# Records of which the positions themselves are compared: they lie beside the rows. Of all others
# only their number is.
_READ = 16

# Records whose texts are encoded together. A tokenizer takes longer for many more at a time.
_BATCH = 256


@dataclass(frozen=True)
class EarlierRun:
    """The records of some prompts, compared with what a job asks for them: nobody who asks for
    other rows shall get none in silence.

    Attributes:
        out: folder of the store.
        model: name of the model, as the engine has it.
        asked: what the job captures.
        max_tokens: tokens that it generates at the most.
        encode: tokens of each of some texts.
    """

    out: Path
    tag: str
    model: str
    asked: CaptureSpec
    max_tokens: int
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]

    def captured(self, prompts: Mapping[str, Any]) -> set[str]:
        """Ids whose records are there and whole.

        Args:
            prompts: by id, a text or an object with `prompt_token_ids`.

        Raises:
            ValueError: a record is of another prompt, model or capture; or the folder has other
                files, and no store.
        """
        store = self._store()
        if store is None:
            return set()
        done = store.request_ids(tag=self.tag).intersection(prompts)
        found = store.filter(tag=self.tag, request_id=done, status="ok")
        self._check_places(found, len(done))
        records = iter(found)
        read = _READ
        while batch := list(islice(records, _BATCH)):
            tokens = self._tokens([prompts[record.request_id] for record in batch])
            for record, given in zip(batch, tokens, strict=True):
                self._check_description(record)
                self._check_layers(record)
                self._check_tokens(record, given)
                self._check_positions(record, read=read > 0)
                read -= 1
        return done

    def _tokens(self, prompts: Sequence[Any]) -> Iterator[Sequence[int]]:
        """The tokens of each prompt; those of texts are made together. A model without a tokenizer
        has no texts."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self.encode(texts) if texts else ())
        for prompt in prompts:
            yield next(encoded) if isinstance(prompt, str) else prompt["prompt_token_ids"]

    def _store(self) -> tllm.stores.Store | None:
        if not self.out.is_dir() or not any(self.out.iterdir()):
            return None
        try:
            return tllm.stores.open(self.out)
        except tllm.stores.StoreError as error:
            if error.reason != "missing":
                raise
            raise ValueError(
                f"out {str(self.out)!r} has other files, and no store; give a new or an empty "
                "folder, or that of a store to go on with"
            ) from None

    def _check_places(self, found: tllm.stores.Store, number: int) -> None:
        keys = found.keys()
        if not keys:
            return
        some_rows = len(found.filter(hook={key.hook for key in keys}))
        for hook, layers in self.asked.hooks:
            # Others are compared with what each record's job asked for.
            for layer in (layers and layers.certain) or (None,):
                lacking = some_rows - len(found.filter(hook=hook, layers=layer))
                if lacking:
                    place = hook if layer is None else f"{hook}:{layer}"
                    raise ValueError(
                        f"out {str(self.out)!r} has records of {number} of these prompts with the "
                        f"tag {self.tag!r}, and {lacking} of them lack {place}, which is asked for "
                        "now; give another --tag or --out"
                    )

    def _check_description(self, record: tllm.stores.StoredRecord) -> None:
        if not _is_same_model(record.model, self.model):
            raise self._other(record, f"of the model {record.model!r}", repr(self.model))
        if record.reduction != self.asked.reduction:
            now = repr(self.asked.reduction)
            raise self._other(record, f"with the reduction {record.reduction!r}", now)
        kept = {str(record.dtype(*key)).removeprefix("torch.") for key in record.keys}
        if self.asked.dtype != "model" and kept - {self.asked.dtype}:
            there = ", ".join(sorted(kept))
            raise self._other(record, f"with rows of {there}", self.asked.dtype)

    def _check_layers(self, record: tllm.stores.StoredRecord) -> None:
        noted = record.metadata.get(ASKED_LAYERS, {})
        for hook, layers in self.asked.hooks:
            if layers is None or hook not in noted:
                continue
            before = Layers.parse(noted[hook], ASKED_LAYERS)
            if not before.is_all and set(layers.uncertain) - set(before.parts):
                there = f"of the layers {before} of {hook}"
                raise self._other(record, there, str(layers))

    def _check_tokens(self, record: tllm.stores.StoredRecord, given: Sequence[int]) -> None:
        if record.token_ids[: record.prompt_len] != tuple(given):
            raise self._other(record, "of another prompt", "that of this input")
        generated = record.num_tokens - record.prompt_len
        if generated > self.max_tokens:
            raise self._other(record, f"of {generated} generated tokens", str(self.max_tokens))

    def _check_positions(self, record: tllm.stores.StoredRecord, *, read: bool) -> None:
        if not record.keys:
            return
        within = _intervals(self.asked.positions, record)
        if record.reduction != "none":
            noted = record.metadata.get(REDUCED_POSITIONS)
            before = None if noted is None else Selection.parse(noted, REDUCED_POSITIONS)
            matches = before is None or _intervals(before, record) == within
        else:
            rows, _ = record.shape(*record.keys[0])
            matches = rows == sum(stop - start for start, stop in within)
            if matches and read:
                there = record.positions(*record.keys[0]).tolist()
                matches = sorted(there) == [p for start, stop in within for p in range(start, stop)]
        if not matches:
            raise self._other(record, "with rows of other positions", "those of --positions")

    def _other(self, record: tllm.stores.StoredRecord, there: str, now: str) -> ValueError:
        return ValueError(
            f"out {str(self.out)!r} has a record of {record.request_id!r} with the tag "
            f"{self.tag!r} {there}, and {now} is asked for now; give another --tag or --out"
        )


def _intervals(positions: Selection, record: tllm.stores.StoredRecord) -> Intervals:
    """Which of a record's tokens are meant."""
    tokens = record.token_ids[:-1]  # the last one has no row
    return intersected(positions.intervals(record.prompt_len, tokens), ((0, len(tokens)),))


def _is_same_model(before: str, now: str) -> bool:
    """Whether two names are one, or two paths of one folder."""
    return before == now or (
        Path(before).exists() and Path(now).exists() and Path(before).samefile(now)
    )
