"""What the prefix cache may serve, and the keys of blocks whose rows were changed."""

from types import SimpleNamespace

from tllm.engine.prefix_cache import BlockKeys, limit_reuse

BLOCK = 4


def keys_of(changes, tokens):
    """The keys of a request's full blocks, found in two goes; plain ones are the tokens up to
    their end."""

    def plain(request):
        known = len(request.block_hashes)
        full = len(request.tokens) // BLOCK
        return [bytes(request.tokens[: BLOCK * (i + 1)]) for i in range(known, full)]

    request, keys = SimpleNamespace(block_hashes=[]), []
    hasher = BlockKeys(plain, BLOCK, changes)
    for length in (9, len(tokens)):
        request.tokens, request.num_tokens = tokens[:length], length
        request.block_hashes = keys = keys + hasher(request)
    return keys


def test_blocks_before_the_first_changed_row_have_the_plain_key():
    tokens = list(range(20))
    plain = [bytes(tokens[:end]) for end in (4, 8, 12, 16, 20)]
    assert keys_of([(0, b"")], tokens) == plain
    found = keys_of([(0, b""), (8, b"patched"), (9, b"")], tokens)
    assert found[:2] == plain[:2]
    assert not set(found[2:]) & set(plain)


def test_blocks_are_shared_by_those_to_whom_the_same_was_done_so_far():
    tokens = list(range(20))
    one = keys_of([(0, b""), (6, b"steered"), (12, b"")], tokens)
    other = keys_of([(0, b""), (6, b"steered"), (12, b""), (16, b"patched")], tokens)
    assert one[:4] == other[:4]
    assert one[4] != other[4]
    moved = keys_of([(0, b""), (7, b"steered"), (12, b"")], tokens)
    assert one[0] == moved[0]
    assert not set(one[1:]) & set(moved[1:])


def test_a_limit_leaves_other_arguments_alone():
    """vLLM 0.33 gives a bound of its own; the smaller one holds."""

    def find(block_hashes, max_cache_hit_length):
        return max_cache_hit_length

    coordinator = SimpleNamespace(find_longest_cache_hit=find)

    def get_computed_blocks(request, max_cache_hit_length=100):
        return coordinator.find_longest_cache_hit([], max_cache_hit_length)

    manager = SimpleNamespace(coordinator=coordinator, get_computed_blocks=get_computed_blocks)
    limit_reuse(manager, {"limited": 48})
    limited, free = SimpleNamespace(request_id="limited"), SimpleNamespace(request_id="free")
    assert manager.get_computed_blocks(limited) == 48
    assert manager.get_computed_blocks(limited, 32) == 32
    assert manager.get_computed_blocks(limited, max_cache_hit_length=64) == 48
    assert manager.get_computed_blocks(free) == 100
    assert manager.get_computed_blocks(free, 32) == 32
