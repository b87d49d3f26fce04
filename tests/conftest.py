"""One process tests one of vLLM's two model runners, chosen before vLLM and Triton are imported.

`TLLM_TEST_RUNNER=v1` (the default) is how tLLM runs on a CPU: the V1 runner, and the PyTorch
references in place of our kernels. `TLLM_TEST_RUNNER=v2` runs the V2 runner, and every Triton
kernel, vLLM's and ours, in Triton's interpreter: a test harness, never a product path. On a machine
with a GPU kernels are compiled, and multiply float32 numbers as such, not as tf32.

One thread a process: threads that wait for each other at every small product, beside another
process that wants the same cores, took five times the time of the work. The number is read when
torch is imported, and never again.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["NUMBA_NUM_THREADS"] = "1"  # drafting with numba sets OpenMP's number to its own

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.metadata import version
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

RUNNER = os.environ.setdefault("TLLM_TEST_RUNNER", "v1")
if RUNNER not in ("v1", "v2"):
    raise ValueError(f"TLLM_TEST_RUNNER={RUNNER!r} is not known; choose v1 or v2")

HAS_GPU = torch.cuda.is_available()
INTERPRETED = RUNNER == "v2" and not HAS_GPU

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "THP_MEM_ALLOC_ENABLE": "1",  # torch's large blocks, as caches are, in pages of 2 MiB
    "TRITON_F32_DEFAULT": "ieee",
    "TRITON_INTERPRET": str(int(INTERPRETED)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": str(int(RUNNER == "v2")),
}
if HAS_GPU:  # to have asked for it is enough for CUDA to refuse a process that is forked from here
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

# How long an example takes says how busy the machine is.
settings.register_profile("tllm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tllm")

pytest_plugins = ["tiny_engines"]


class InterpretedDriver:
    """What vLLM asks of a Triton driver: whether there is one."""

    @staticmethod
    def is_active() -> bool:
        return True


if INTERPRETED:
    import triton.backends

    from tests.interpreter import check_overflow, interpret_faster

    interpret_faster()
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=InterpretedDriver, compiler=None)

    # vLLM 0.30 gives Triton up when no distribution is called "vllm"; its CPU build is "vllm-cpu".
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "cpu" if name == "vllm" else version(name))
        import vllm.triton_utils  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "kernels: runs Triton kernels; without a GPU, in the v2 pass"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Engines start sooner; with a GPU they start as a user's."""
    if not HAS_GPU and ("vllm" in sys.modules or len(session.items) > 100):
        from tests.engine_starts import prepare

        prepare()


def pytest_unconfigure() -> None:
    """Python waits at its exit for processes that were started, also for one that hangs."""
    ours, left = psutil.Process(), []
    helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
    for process in ours.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if process.parent() != ours or not any(name in command for name in helpers):
                left.append(process)  # helpers end with this process
    for process in psutil.wait_procs(left, timeout=5)[1]:  # a worker ends after its engine
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            print(f"killed a process that tests left behind: {process.pid} {command[:200]}")
            process.kill()


def pytest_report_header() -> str:
    return f"vLLM model runner: {RUNNER} (TLLM_TEST_RUNNER)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not (HAS_GPU or INTERPRETED):
        skip = pytest.mark.skip(reason="without a GPU, kernels need TLLM_TEST_RUNNER=v2")
        for item in items:
            if item.get_closest_marker("kernels"):
                item.add_marker(skip)


WATCHED = ("test_kernels.py", "test_esamp_kernels.py", "test_recorded_calls.py")


@pytest.fixture(autouse=INTERPRETED, scope="module")
def watched_integers(request: pytest.FixtureRequest) -> None:
    """Integers of kernels that run alone are watched for overflow. In an engine vLLM draws with
    some that overflow, and so may lanes of a relay whose result is not used."""
    check_overflow(wanted=request.path.name in WATCHED)


@pytest.fixture(scope="module")
def forked_processes() -> Iterator[None]:
    """Engines in processes of their own begin sooner."""
    from tests.forked_processes import forked

    with forked():
        yield


@pytest.fixture
def invoke(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """`invoke(*arguments)`: exit status, output and errors of `tllm` in this process.

    Typer's own runner has no file descriptors, which vLLM 0.30 wants of its output.
    """
    from tllm.cli import app

    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            app(arguments)
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return call


@pytest.fixture(scope="session", autouse=INTERPRETED)
def _kernels_that_can_be_interpreted():
    """vLLM's own top-k and top-p kernel is beyond Triton's interpreter, as is 0.30's `log1p`."""
    from triton import language
    from triton.language.extra import libdevice
    from vllm.v1.sample.ops import topk_topp_sampler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_topp_sampler, "HAS_TRITON", False)
        patch.setattr(libdevice, "log1p", lambda x: language.log(1 + x))
        yield
