"""What a client names stays where the administrator put it, and nothing that it sends is run."""

import base64
import pickle

import pytest
from server.test_serving import SET_TO_ZERO, WORDS

from tllm import stores

ELSEWHERE = ["../../elsewhere", "/tmp/elsewhere", "a/../../elsewhere", "..", "C:\\elsewhere", "~"]


def files_around(server):
    """All files beside the server's, outside its store, but for those that metrics are kept in."""
    folder = server.log.parent
    found = (p for p in folder.parent.rglob("*") if p.suffix != ".db")
    return {p for p in found if folder / "store" not in p.parents}


def test_records_stay_in_their_store_whatever_they_are_called(server):
    before = files_around(server)
    for tag in ELSEWHERE:
        hooks = {"hooks": {"post_block": [1]}, "positions": "all"}
        capture = {"filesystem": {**hooks, "tag": tag, "request_id": tag}}
        answer = server.post(
            "/v1/completions", {**WORDS, "max_tokens": 2, "capture": capture}, key=None
        )
        assert answer.status_code == 200, answer.text
    store = stores.open(server.log.parent / "store")
    for tag in ELSEWHERE:
        record = store.record(tag, tag=tag)
        assert record.status == "ok"
    assert {each.name for each in files_around(server) - before} <= {"store"}


class Runs:
    """Makes a file when it is restored from a pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_no_vector(server, tmp_path):
    mark = tmp_path / "ran"
    sent = base64.b64encode(pickle.dumps(Runs(mark))).decode()
    packed = {"dtype": "float32", "shape": [128], "data": sent}
    for vector in (sent, packed, {"pickle": sent}):
        asked = {"steering_vectors": {"post_block": {"2": vector}}, "max_tokens": 2}
        answer = server.post("/v1/completions", WORDS | asked, key=None)
        assert answer.status_code == 400
        body = {"name": "pickled", "spec": {"post_block": {"2": vector}}}
        assert server.post("/v1/steering/modules/register", body).status_code == 400
    assert not mark.exists()
    pickle.loads(base64.b64decode(sent)).close()  # it would have been seen
    assert mark.exists()


@pytest.mark.parametrize(
    "asked",
    [
        {"steering_vectors": "/etc/passwd"},
        {"steering_vectors": {"post_block": {"2": "/etc/passwd"}}},
        {"steering_name": "../../etc/passwd"},
        {"patch": [SET_TO_ZERO | {"source": {"tensor": "/etc/passwd"}}]},
        {"patch": [SET_TO_ZERO | {"source": {"run": "/etc/passwd"}}]},
        {"consumers": {"probe": {"path": "/etc/passwd"}}},
        {"capture": {"filesystem": {"hooks": {"post_block": [1]}, "root": "/tmp/elsewhere"}}},
    ],
)
def test_a_request_reads_no_file_and_chooses_no_folder(server, asked):
    answer = server.post("/v1/completions", {**WORDS, "max_tokens": 2, **asked}, key=None)
    assert answer.status_code == 400
    assert "root:" not in answer.text
