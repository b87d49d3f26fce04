"""File names made of what users call things."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tllm.stores.format import checked_text, file_name

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=80)


@given(TEXT, TEXT)
@example("a", "A")
@example("a/b", "a%2fb")
@example("", "%")
@example("+a", "A")
@example("..", ".")
@example("ß", "SS")
@example("ſ", "s")
@example("K", "k")
def test_two_texts_never_share_a_name_even_where_case_does_not_count(a: str, b: str) -> None:
    if a != b:
        assert file_name(a).casefold() != file_name(b).casefold()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=400))
@example("../../etc/passwd")
@example("/absolute")
@example("CON")
@example("nul.txt")
@example("com1")
@example("a\0b")
@example(".hidden")
@example("trailing.")
@example("~" * 500)
def test_a_name_is_one_safe_component(text: str) -> None:
    name = file_name(text)
    assert name.isascii()
    assert not set(name) & set('/\\:*?"<>|@ \0')
    assert 0 < len(name) <= 160
    assert name not in (".", "..")
    assert not name.startswith((".", "-")) or text.startswith("-")
    assert not name.endswith(".")
    assert name.partition(".")[0] not in ("con", "prn", "aux", "nul", "com1", "lpt9")


def test_long_texts_that_differ_at_the_end_get_different_names() -> None:
    names = {file_name("x" * 900 + str(i)) for i in range(100)}
    assert len(names) == 100
    assert all("~" in name for name in names)


def test_a_name_stays_readable() -> None:
    assert file_name("cmpl-12.3_b") == "cmpl-12.3_b"
    assert file_name("Probe") == "+probe"
    assert file_name("a/b") == "a%2fb"


def test_equivalent_unicode_is_one_text() -> None:
    decomposed = unicodedata.normalize("NFD", "café")
    assert decomposed != "café"
    assert checked_text("tag", decomposed) == "café"


@pytest.mark.parametrize("text", ["a\nb", "\0", "\ud800", "\x1b[31m", "x" * 1025, "é" * 513])
def test_what_cannot_be_an_id_is_refused_by_field(text: str) -> None:
    with pytest.raises(ValueError, match="request_id"):
        checked_text("request_id", text)
