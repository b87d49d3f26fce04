"""What is done to a sequence by several parties, against what each does position by position."""

from hypothesis import given
from hypothesis import strategies as st

from tllm.spec.changes import combined

DIGESTS = st.sampled_from([b"", b"", b"one", b"two"])
STARTS = st.lists(st.integers(1, 12), unique=True, max_size=4).map(
    lambda found: [0, *sorted(found)]
)
CHANGES = STARTS.flatmap(
    lambda starts: st.tuples(*(DIGESTS for _ in starts)).map(
        lambda done: list(zip(starts, done, strict=True))
    )
)


def at(changes, position):
    return [digest for start, digest in changes if start <= position][-1]


@given(st.dictionaries(st.sampled_from(["steering", "patch", "gate"]), CHANGES, min_size=1))
def test_positions_have_one_digest_where_the_same_is_done_to_them(parts):
    found = combined(parts)
    assert found[0][0] == 0
    done = {p: tuple((name, at(parts[name], p)) for name in sorted(parts)) for p in range(14)}
    for p in done:
        assert bool(at(found, p)) == any(digest for _, digest in done[p])
        for q in done:
            assert (at(found, p) == at(found, q)) == (done[p] == done[q])


def test_who_does_it_counts():
    once = combined({"steering": [(0, b"one")], "patch": [(0, b"")]})
    assert once != combined({"steering": [(0, b"")], "patch": [(0, b"one")]})
