"""A model that is not there, in every command that takes one."""

from __future__ import annotations

import json

import pytest

COMMANDS = {
    "serve": ["serve", "MODEL", "--dry-run"],
    "run-batch": ["run-batch", "MODEL", "-i", "LINES", "-o", "OUT"],
    "verify": ["verify", "MODEL"],
    "capture": [
        *("capture", "--model", "MODEL", "--input", "LINES", "--out", "OUT"),
        *("--hooks", "embed"),
    ],
    "sweep": ["sweep", "MODEL", "--clean", "a", "--corrupt", "b", "--metric", "kl"],
    "strength-sweep": [
        *("strength-sweep", "MODEL", "--vectors", "LINES", "--strengths", "0,1"),
        *("--prompt", "a", "--matches", "b"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_without_a_model_is_refused_as_that(invoke, tmp_path, command):
    """After half a minute they said that such a name on the hub may have no slash in front."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps("a story") + "\n")
    gone, out = tmp_path / "gone", tmp_path / "out"
    places = {"MODEL": str(gone), "LINES": str(lines), "OUT": str(out)}
    status, _, error = invoke(*(places.get(word, word) for word in COMMANDS[command]))
    assert status == 2
    assert f"the model '{gone}' is not there; give a folder that is, or a name" in error
    assert not out.exists()


def test_a_name_that_is_no_folder_either_is_said_to_be_none(invoke, forked_processes):
    status, _, error = invoke("verify", "no/model")
    assert status == 2
    assert "not verified (there is no such folder here):" in error
