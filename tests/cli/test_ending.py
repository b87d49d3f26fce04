"""Commands that are told to end, in the midst of whatever they do."""

import signal
import subprocess
import sys

import pytest

from tllm.cli.ending import end_with_signals
from tllm.runtime.dispatch import ends_process

TOLD = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def as_at_first():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in TOLD}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", TOLD)
def test_what_ends_a_command_is_not_taken_for_the_error_of_a_consumer(as_at_first, number):
    """Its engine may be in this process, and in a consumer's code."""
    end_with_signals()
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(number)
    assert raised.value.code == 128 + number
    assert ends_process(raised.value)


def test_who_tells_it_again_does_not_wait():
    script = """
import signal
from tllm.cli.ending import end_with_signals

end_with_signals()
try:
    signal.raise_signal(signal.SIGTERM)
except SystemExit:
    signal.raise_signal(signal.SIGTERM)
print("it goes on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
