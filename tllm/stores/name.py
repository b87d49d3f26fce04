"""File names made of what users call their requests."""

from __future__ import annotations

import hashlib
import unicodedata

MAX_TEXT_BYTES = 1024
"""Longest request id, tag or writer id, in UTF-8."""

_MAX_NAME = 160
"""Longest file name made of one id; what is appended to it stays below the usual 255."""

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10))]
)


def checked_text(field: str, text: str) -> str:
    """`text` in Unicode's normal form C.

    Raises `ValueError` that names `field` for what cannot be an id: no string, more than
    `MAX_TEXT_BYTES` in UTF-8, control characters, or lone surrogates.
    """
    if not isinstance(text, str):
        raise ValueError(f"{field}={text!r} is not allowed; give a string")
    if text.isascii() and text.isprintable() and len(text) <= MAX_TEXT_BYTES:
        return text
    normal = unicodedata.normalize("NFC", text)
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in normal):
        raise ValueError(
            f"{field}={text!r} has control characters or lone surrogates; leave them out"
        )
    if (size := len(normal.encode())) > MAX_TEXT_BYTES:
        raise ValueError(
            f"{field} has {size} bytes in UTF-8; at most {MAX_TEXT_BYTES} are allowed: "
            "give a shorter one, and put the rest into metadata"
        )
    return normal


def file_name(text: str) -> str:
    """A file name for `text` that no other text gets, on any usual file system.

    Lower-case letters, digits, `_`, `-` and inner dots stand for themselves; an upper-case letter
    is `+` and its lower case (file systems may ignore case); every other byte of UTF-8 is `%xx`.
    The first character is escaped too where a system reserves the name (`con`, `nul.txt`), and
    dots at either end are. No text is the name `%`. What would be longer than 160 characters is
    cut to 120 and gets `~` and the first 128 bits of its SHA-256: there, and only there, different
    names rest on that hash.
    """
    if not text:
        return "%"
    last = len(text) - 1
    reserved = text.partition(".")[0].lower() in _DEVICES
    name = "".join(
        _escape(c, plain=not (i == 0 and reserved) and not (c == "." and i in (0, last)))
        for i, c in enumerate(text)
    )
    if len(name) > _MAX_NAME:
        return f"{name[:120]}~{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return name


def _escape(character: str, plain: bool) -> str:
    if plain and character in _PLAIN:
        return character
    if plain and "A" <= character <= "Z":
        return f"+{character.lower()}"
    return "".join(f"%{byte:02x}" for byte in character.encode())
