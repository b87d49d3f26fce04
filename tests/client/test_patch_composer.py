"""What a request's patches are composed to, without an engine."""

from __future__ import annotations

import pytest

from tllm.client import patching
from tllm.client.facts import Facts
from tllm.spec.hooks import ModelPoints
from tllm.spec.patching import RequestPatch


def test_noise_for_which_there_is_no_room_is_not_drawn(monkeypatch):
    composer = patching.PatchComposer()
    composer.facts = Facts(
        points=ModelPoints("any", 4, {}),
        hidden_size=1024,
        vocab_size=100,
        dtype="bfloat16",
        row_bytes=2048,
        max_value=3e38,
        max_configs=8,
        max_mib=1,
        max_patch_mib=1,
        max_patch_host_mib=0,
        centers_rows=False,
    )
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
