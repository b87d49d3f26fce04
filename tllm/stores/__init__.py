"""Activations on disk: writing and reading them. Knows neither the engine nor vLLM.

Payloads are plain safetensors files, sidecars JSON; doc/reference/store-format.md describes both.
"""

from tllm.stores.batches import Batch
from tllm.stores.catalog import Damage
from tllm.stores.error import StoreError, WriterInUseError
from tllm.stores.export import export
from tllm.stores.format import Layout
from tllm.stores.reader import Store
from tllm.stores.reader import open_store as open
from tllm.stores.record import ArrayKey, Record, RecordMeta, Rows, StackedRows
from tllm.stores.recording import Published, RecordStream
from tllm.stores.stored_record import StoredRecord
from tllm.stores.verify import Problem, Verification
from tllm.stores.writer import StoreWriter, WriterOptions, WriterStats

__all__ = [
    "ArrayKey",
    "Batch",
    "Damage",
    "Layout",
    "Problem",
    "Published",
    "Record",
    "RecordMeta",
    "RecordStream",
    "Rows",
    "StackedRows",
    "Store",
    "StoreError",
    "StoreWriter",
    "StoredRecord",
    "Verification",
    "WriterInUseError",
    "WriterOptions",
    "WriterStats",
    "export",
    "open",
]
