"""What the benchmarks say that a step costs."""

from inspect import isfunction

from benchmarks.call_times import CALLS
from benchmarks.step_costs import Traced, compared, of_profile, watch, watched
from tllm.runtime.steps import Steps


def test_a_kernel_that_began_early_counts_from_the_end_of_the_one_before():
    events = [
        Traced("cudaLaunchKernelExC", False, 0, 5_000),
        Traced("cudaEventRecord", False, 0, 5_000),
        Traced("product", True, 10_000, 20_000),
        Traced("norm", True, 15_000, 24_000),
        Traced("inside", True, 16_000, 18_000),
        Traced("product", True, 30_000, 40_000),
    ]
    found = of_profile(events, 2)
    assert found["launches"] == 0.5
    assert found["kernels"] == 2
    assert found["by_kernel"] == {"product": [1, 10], "norm": [0.5, 2], "inside": [0.5, 0]}
    assert found["gpu_us"] == 12


def test_only_kernels_that_one_has_more_of_count_as_more():
    vllm = {"host_us": 100.0, "launches": 3.0, "by_kernel": {"a": [2, 50.0], "norm": [4, 8.0]}}
    tllm = {
        "host_us": 120.0,
        "own_host_us": 15.0,
        "launches": 4.0,
        "by_kernel": {"a": [2, 55.0], "norm": [1, 2.0], "tap": [3, 9.0]},
    }
    found = compared(vllm, tllm)
    assert found["changed"] == {"tap": [3, 9.0], "norm": [-3, -6.0]}
    assert (found["more_gpu_us"], found["more_launches"]) == (3.0, 1.0)
    assert (found["more_host_us"], found["own_host_us"]) == (20.0, 15.0)
    assert "by_kernel" not in found["vllm"]


def test_all_calls_of_a_step_are_timed():
    """A figure that leaves some out looks better than it is."""
    methods = {name for name, it in vars(Steps).items() if isfunction(it) and name[0] != "_"}
    assert methods - {"skip", "rest", "when_decided", "count_drafts"} == {*CALLS}


def test_a_worker_is_watched_for_one_round(llm):
    from tllm import SamplingParams

    llm.collective_rpc(watch, args=(8,))
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    (found,) = llm.collective_rpc(watched)
    assert found["steps_timed"] == 2
    assert found["host_us"] > found["own_host_us"] > 0
    (worker,) = llm.collective_rpc(lambda worker: worker.worker)
    assert "execute_model" not in vars(worker)
    assert not {*CALLS} & {*vars(worker.session.steps)}
