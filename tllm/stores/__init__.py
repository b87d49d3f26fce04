"""Activations on disk: writing and reading them. Knows neither the engine nor vLLM.

Payloads are plain safetensors files, sidecars JSON; doc/reference/store-format.md describes both.
"""

from tllm.stores.batches import Batch
from tllm.stores.catalog import Damage
from tllm.stores.error import StoreError, WriterInUseError
from tllm.stores.export import export
from tllm.stores.format import Layout
from tllm.stores.publish import Published
from tllm.stores.reader import Store, StoredRecord
from tllm.stores.reader import open_store as open
from tllm.stores.record import ArrayKey, Record, RecordMeta, Rows, StackedRows
from tllm.stores.verify import Problem, Verification
from tllm.stores.writer import RecordStream, StoreWriter, WriterOptions, WriterStats

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
