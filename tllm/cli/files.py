"""Files that commands read, and that they write when their work is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def check_there(option: str, path: Path | None) -> None:
    """Refuse a file or folder that is not there, before an engine is started."""
    if path is not None and not path.exists():
        raise ValueError(f"{option} {str(path)!r} is not there; give a file or folder that is")


def check_model(model: str) -> None:
    """Refuse the path of a model that is not there: whoever looks for it later takes it for a name
    on the hub, and says that such a name has no slash at its beginning."""
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ValueError(
            f"the model {model!r} is not there; give a folder that is, or a name on the Hugging "
            "Face hub"
        )


def missing_here(model: str, error: Exception) -> str:
    """What an error leaves out of a model that may be meant to be in a folder."""
    sought = isinstance(error, OSError) and not Path(model).exists()
    return " (there is no such folder here)" if sought else ""


def check_writable(option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Refuse a file that could not be written, before minutes of work.

    Args:
        endings: what its name may end in; anything unless told.
    """
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise ValueError(f"{option} {str(path)!r} must end in {' or '.join(endings)}")
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}")
