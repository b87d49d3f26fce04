"""What a request's patches are composed to, without an engine."""

from __future__ import annotations

import pytest
from client.small_facts import small_facts

from tllm.client import patching
from tllm.spec.patching import RequestPatch


def test_noise_for_which_there_is_no_room_is_not_drawn(monkeypatch):
    composer = patching.PatchComposer()
    composer.facts = small_facts(4, 1024, max_patch_mib=1)
    drawn = []
    draw = patching.noise_rows
    monkeypatch.setattr(patching, "noise_rows", lambda *given: drawn.append(given) or draw(*given))

    def asked(count):
        entry = {"hook": "post_block", "layer": 0, "source": {"noise": 1.0}}
        return RequestPatch.parse([{**entry, "positions": range(count)}] * 2)

    with pytest.raises(ValueError, match=r"patch brings 1\.1 MiB of rows, and max_patch_mib=1"):
        composer.uses(asked(140))
    assert not drawn
    assert [len(use.rows) for use in composer.uses(asked(128))] == [128 * 4096] * 2
