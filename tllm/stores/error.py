"""What a store raises when it cannot keep, or cannot find, what it was asked for."""

from __future__ import annotations

import errno as errno_codes
import os
from typing import Literal

Reason = Literal["collision", "limit", "dropped", "io", "aborted", "closed", "damaged", "missing"]


class StoreError(Exception):
    """A record could not be written or read.

    Attributes:
        reason: `collision` (the record exists and `on_collision="error"`), `limit` (`max_bytes` is
            reached), `dropped` (the queue or the spill file was full), `io` (the operating system
            refused; see `errno`), `aborted`, `closed` (the writer was), `damaged` (a file is not
            what its sidecar says), `missing` (no such record, array or file).
        errno: the operating system's error number, for `io`.
    """

    def __init__(self, message: str, reason: Reason, errno: int | None = None) -> None:
        super().__init__(plain_text(message))
        self.reason: Reason = reason
        self.errno = errno

    def __reduce__(self) -> tuple[type[StoreError], tuple[str, Reason, int | None]]:
        return StoreError, (str(self), self.reason, self.errno)

    @classmethod
    def from_os_error(cls, what: str, error: OSError) -> StoreError:
        """`what` failed with an error of the operating system."""
        return cls(f"{what}: {describe(error)}", "io", error.errno)


def describe(error: OSError) -> str:
    """`No space left on device [ENOSPC] (/path)`."""
    code = error.errno
    text = error.strerror or (os.strerror(code) if code else str(error))
    name = f" [{errno_codes.errorcode.get(code, code)}]" if code else ""
    path = (
        f" ({os.fspath(error.filename)})" if isinstance(error.filename, (str, os.PathLike)) else ""
    )
    return f"{text}{name}{path}"


def plain_text(text: str) -> str:
    """`text` with lone surrogates escaped: a file's name may have them, and neither UTF-8 nor a
    terminal takes them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class WriterInUseError(ValueError):
    """A store's `writer_id` is another writer's now.

    Attributes:
        owner: the process that has it, and its host.
    """

    def __init__(self, message: str, owner: str) -> None:
        super().__init__(message)
        self.owner = owner

    def __reduce__(self) -> tuple[type[WriterInUseError], tuple[str, str]]:
        return WriterInUseError, (str(self), self.owner)
