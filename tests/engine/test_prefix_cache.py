"""The limit of what the prefix cache may serve, whatever else vLLM asks it."""

from types import SimpleNamespace

from tllm.engine.prefix_cache import limit_reuse


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
