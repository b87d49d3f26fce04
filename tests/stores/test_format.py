"""A reader written from doc/reference/store-format.md, with json and safetensors alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.stores.samples import LAYOUTS, bits, record_of, rows_of
from tllm.stores import Record, RecordMeta, Rows, StoreWriter

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "doc/reference/store-format.md"


def read_store(root: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """`(tag, request id, sample)` to `{"line": ..., "arrays": {(hook, layer): (rows, positions)}}`.

    Step by step as the document says.
    """
    # 1. The marker.
    marker = json.loads((root / "tllm-store.json").read_text())
    assert marker == {"format": "tllm-store", "version": 1}
    # 2. The sidecars' lines.
    lines = []
    for pattern in ("*/sharded/*.jsonl", "*/packed/*/*.json", "*/per_file/*/*.json"):
        for sidecar in sorted((root / "writers").glob(pattern)):
            for text in sidecar.read_text().splitlines():
                line = json.loads(text)
                checksum = line.pop("crc32")
                canonical = json.dumps(line, sort_keys=True, separators=(",", ":"))
                assert zlib.crc32(canonical.encode()) == checksum
                lines.append((sidecar.parent, line))
    # 3. Parts of one record.
    records: dict[tuple, list] = {}
    for folder, line in lines:
        names = line["record_id"], line["tag"], line["request_id"], line["sample_index"]
        records.setdefault(names, []).append((folder, line))
    # 4. Whole records, the newest where one replaces another.
    whole: dict[tuple, list] = {}
    for parts in records.values():
        parts.sort(key=lambda part: (part[1]["stage"], part[1]["part"]))
        last = [line for _, line in parts if line["last"]]
        if len(last) < last[0]["num_stages"] if last else True:
            continue
        if any(line["status"] == "aborted" for line in last):
            continue
        head = last[0]
        identity = (head["tag"], head["request_id"], head["sample_index"])
        whole.setdefault(identity, []).append((head, parts))
    found = {}
    for identity, heads in whole.items():
        newest = max((h["generation"] for h, _ in heads if h["replaces"]), default=0)
        for head, parts in heads:
            if head["generation"] >= newest:
                found[(*identity, head["generation"])] = {
                    "line": head,
                    "arrays": read_arrays(parts),
                }
    return found


def read_arrays(parts: list) -> dict:
    """5. The rows."""
    arrays: dict = {}
    for folder, line in parts:
        for piece in line["arrays"]:
            with safe_open(folder / piece["file"], "pt") as payload:
                start, stop = piece["row_start"], piece["row_start"] + piece["rows"]
                rows = payload.get_slice(piece["tensor"])[start:stop]
                start, stop = piece["position_start"], piece["position_start"] + piece["rows"]
                positions = payload.get_slice("positions")[start:stop]
            checksum = zlib.crc32(bits(rows).numpy().tobytes())
            assert zlib.crc32(positions.numpy().tobytes(), checksum) == piece["crc32"]
            known = arrays.setdefault((piece["hook"], piece["layer"]), ([], []))
            known[0].append(rows)
            known[1].append(positions)
    return {key: (torch.cat(rows), torch.cat(places)) for key, (rows, places) in arrays.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_written_from_the_document_reads_everything(tmp_path: Path, layout) -> None:
    given = [record_of(f"r{n}", tag="T" if n % 2 else "", rows=1 + n) for n in range(6)]
    with StoreWriter(tmp_path, layout=layout, on_collision="overwrite") as writer:
        for record in given:
            writer.submit(record)
        # One that is long, one that is given up, one that is replaced.
        stream = writer.begin(RecordMeta("long"))
        gone = writer.begin(RecordMeta("gone"))
        for step in range(5):
            stream.append("lm_head_in", None, [step], torch.full((1, 3), float(step)))
            gone.append("lm_head_in", None, [step], torch.full((1, 3), float(step)))
            writer.flush()
        stream.finish(token_ids=[5, 6])
        gone.abort()
        writer.flush()
        replaced = record_of("r0", rows=9)
        writer.submit(replaced)
    for stage in (0, 1):
        with StoreWriter(tmp_path, layout=layout, writer_id=f"pp{stage}") as writer:
            meta = RecordMeta("staged", record_id="x", stage=stage, num_stages=2)
            rows = Rows(rows_of(str(stage), 2, 4), [3, 8])
            writer.submit(Record(meta, {("mlp_out", stage): rows}))

    found = read_store(tmp_path)
    assert len(found) == len(given) + 2
    for record in [replaced, *given[1:]]:
        meta = record.meta
        generation = 2 if record is replaced else 1
        read = found[meta.tag, meta.request_id, 0, generation]
        assert read["line"]["token_ids"] == list(meta.token_ids)
        assert read["line"]["model"] == "a/model"
        assert read["line"]["versions"]["torch"] == torch.__version__
        for key, rows in record.arrays.items():
            assert torch.equal(read["arrays"][key][0], rows.tensor)
            assert read["arrays"][key][1].tolist() == rows.positions.tolist()
    long = found["", "long", 0, 1]
    assert long["arrays"]["lm_head_in", None][0][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert long["line"]["token_ids"] == [5, 6]
    staged = found["", "staged", 0, 1]["arrays"]
    assert {key: rows[1].tolist() for key, rows in staged.items()} == {
        ("mlp_out", 0): [3, 8],
        ("mlp_out", 1): [3, 8],
    }


def test_the_document_names_every_field(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    with StoreWriter(tmp_path, layout="packed") as writer:
        writer.submit(record_of("r"))
    (sidecar,) = (tmp_path / "writers").rglob("*.json")
    line = json.loads(sidecar.read_text())
    fields = [*line, *line["arrays"][0]]
    assert [name for name in fields if f"`{name}`" not in text] == []


def test_the_document_names_every_column_of_the_index(tmp_path: Path) -> None:
    from tllm import stores

    text = DOCUMENT.read_text()
    with StoreWriter(tmp_path) as writer:
        writer.submit(record_of("r"))
    columns = stores.open(tmp_path).index().column_names
    assert [name for name in columns if f"`{name}`" not in text] == []


def test_the_documents_example_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok\ntorch.Size([3, 64])")
