"""Processes that tests fork are as fresh as spawned ones."""

import multiprocessing
import os
import sys

from tests.forked_processes import EnvironedProcess, ForkedProcess, forking


def tell(telling):
    kind = multiprocessing.get_context("spawn").Process
    telling.send((os.environ.get("OF_THE_TEST"), issubclass(kind, ForkedProcess)))


def tell_of_another(telling):
    listening, said = multiprocessing.Pipe(duplex=False)
    another = multiprocessing.get_context("spawn").Process(target=tell_imports, args=(said,))
    another.start()
    telling.send((os.getppid(), *listening.recv()))
    another.join()


def tell_imports(telling):
    telling.send((os.getppid(), "vllm.v1.engine.core" in sys.modules))


def told_by(kind, tell=tell):
    listening, telling = multiprocessing.Pipe(duplex=False)
    process = kind(target=tell, args=(telling,))
    process.start()
    told = listening.recv()
    process.join()
    return told


def test_they_have_the_environment_of_who_starts_them(monkeypatch):
    with forking():
        monkeypatch.setenv("OF_THE_TEST", "first")
        assert told_by(multiprocessing.get_context("spawn").Process) == ("first", True)
        monkeypatch.setenv("OF_THE_TEST", "second")
        assert told_by(EnvironedProcess) == ("second", False)
        monkeypatch.delenv("OF_THE_TEST")
        assert told_by(EnvironedProcess) == (None, False)
    assert not issubclass(multiprocessing.get_context("spawn").Process, ForkedProcess)


def test_what_they_spawn_is_forked_from_the_same_server():
    with forking():
        process = multiprocessing.get_context("spawn").Process
        first, second, imported = told_by(process, tell_of_another)
    assert first == second != os.getpid()
    assert imported
