"""What the prefix cache may serve, and the keys of blocks whose rows were changed."""

import random
from types import SimpleNamespace

from vllm.multimodal.inputs import PlaceholderRange

from tllm.engine.media import seen_whole
from tllm.engine.prefix_cache import BlockKeys, limit_reuse

BLOCK = 4


def keys_of(changes, tokens, whole=()):
    """The keys of a request's full blocks, found in two goes; plain ones are the tokens up to
    their end."""

    def plain(request):
        known = len(request.block_hashes)
        full = len(request.tokens) // BLOCK
        return [bytes(request.tokens[: BLOCK * (i + 1)]) for i in range(known, full)]

    request, keys = SimpleNamespace(block_hashes=[]), []
    hasher = BlockKeys(plain, BLOCK, changes, whole)
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


def test_blocks_have_one_key_where_the_same_is_done_up_to_their_ends():
    pick = random.Random(0)

    def drawn(most):
        starts = [0, *sorted(pick.sample(range(1, 40), pick.randrange(most)))]
        return [(start, pick.choice([b"", b"one", b"other"])) for start in starts]

    tokens = list(range(40))
    for whole in ((), ((2, 7),), ((5, 9), (10, 14))) * 30:
        plain, one = keys_of([(0, b"")], tokens, whole), drawn(12)
        shared = pick.randrange(40)
        other = [each for each in one if each[0] < shared]
        other += [each for each in drawn(6) if each[0] > shared]
        found = zip(plain, keys_of(one, tokens, whole), keys_of(other, tokens, whole), strict=True)
        for block, (key, ones, others) in enumerate(found):
            end = (block + 1) * BLOCK
            end = next((stop for start, stop in whole if start < end < stop), end)
            done = [[each for each in changes if each[0] < end] for changes in (one, other)]
            assert (ones == key) == (not any(digest for _, digest in done[0]))
            if any(digest for _, digest in done[0]):
                assert (ones == others) == (done[0] == done[1])


def test_a_block_within_an_image_that_sees_all_of_itself_hangs_on_all_of_it():
    """Images at 2 to 10 and at 13 to 18; a row of each is changed, in a block after its first."""
    tokens = list(range(24))
    features = [
        SimpleNamespace(modality="image", mm_position=PlaceholderRange(13, 5)),
        SimpleNamespace(modality="image", mm_position=PlaceholderRange(2, 8)),
        SimpleNamespace(modality="audio", mm_position=PlaceholderRange(20, 4)),
    ]
    assert seen_whole(features, SimpleNamespace(is_mm_prefix_lm=False)) == []
    whole = seen_whole(features, SimpleNamespace(is_mm_prefix_lm=True))
    plain = keys_of([(0, b"")], tokens, whole)
    assert plain == keys_of([(0, b"")], tokens)
    second = [(0, b""), (17, b"steered"), (18, b"")]
    assert keys_of(second, tokens)[:4] == plain[:4]
    assert keys_of(second, tokens, whole)[:3] == plain[:3]
    assert not set(keys_of(second, tokens, whole)[3:]) & set(plain)
    both = [(0, b""), (9, b"steered"), (10, b""), *second[1:]]
    found = keys_of(both, tokens, whole)
    assert not set(found) & set(plain), "its first block has tokens that see the ninth"
    first = keys_of(both[:3], tokens, whole)
    assert found[:3] == first[:3], "nothing is done yet to what the third block sees"
    assert not set(found[3:]) & set(first)


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
