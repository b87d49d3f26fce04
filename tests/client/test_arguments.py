"""What an engine is started with is declared once, as vLLM and we take it."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields

import pytest
import vllm
from client import vllm_arguments
from vllm import AsyncEngineArgs, EngineArgs

from tllm import LLM, AsyncLLM
from tllm.client.arguments import AsyncLLMArguments, LLMArguments, OurArguments, split
from tllm.client.vllm_arguments import VllmArguments
from tllm.engine.options import EngineOptions, engine_arguments

OF_VLLM_032 = pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."), reason="the arguments are those of vLLM 0.32"
)


@OF_VLLM_032
def test_the_arguments_are_those_of_vllm():
    assert vllm_arguments.PATH.read_text() == vllm_arguments.module(), (
        "run: python tests/client/vllm_arguments.py"
    )


@OF_VLLM_032
def test_nothing_that_vllm_takes_is_missing():
    of_engine = {field.name for field in fields(EngineArgs)}
    of_llm = set(inspect.signature(vllm.LLM.__init__).parameters) - {"self", "kwargs"}
    ours = OurArguments.__annotations__.keys()
    assert LLMArguments.__annotations__.keys() - ours == (of_engine | of_llm) - {"model"}
    of_async = {field.name for field in fields(AsyncEngineArgs)} - {"model"}
    assert AsyncLLMArguments.__annotations__.keys() - ours == of_async
    assert not ours & VllmArguments.__annotations__.keys()


def test_our_arguments_are_the_options_of_the_engine():
    of_client = {"consumers", "capture_consumers", "result_timeout_s", "enable_steering"}
    assert OurArguments.__annotations__.keys() == of_client | {
        f.name for f in fields(EngineOptions)
    }


def test_arguments_are_split_by_whom_they_are_for():
    given = {"consumers": ["logging"], "capture_mib": 8, "fuse_norms": None, "dtype": "float32"}
    assert split(given) == ({"consumers": ["logging"]}, {"capture_mib": 8}, {"dtype": "float32"})
    assert split({"enable_steering": False}) == ({}, {"max_steering_configs": 0}, {})
    assert split({"hook_points": "post_block"})[1] == {"hook_points": ("post_block",)}
    assert split({"hook_points": ["a", "b"]})[1] == {"hook_points": ("a", "b")}
    assert split({"hook_points": "all"})[1] == {"hook_points": "all"}


def test_the_capture_ring_may_take_a_share_of_the_device_unless_told():
    gib = 2**30
    assert EngineOptions().most_capture_bytes(0) == 2 * gib
    assert EngineOptions().most_capture_bytes(24 * gib) == 2 * gib
    assert EngineOptions().most_capture_bytes(140 * gib) == 7 * gib
    assert EngineOptions(max_capture_mib=64).most_capture_bytes(140 * gib) == 64 * 2**20
    with pytest.raises(ValueError, match="max_capture_mib=0"):
        EngineOptions(max_capture_mib=0)


def test_the_capture_ring_begins_within_its_limit():
    """It began with 64 MiB, whatever the limit was."""
    assert EngineOptions(max_capture_mib=8).first_capture_bytes == 8 * 2**20
    assert EngineOptions(capture_mib=4096).first_capture_bytes == 4096 * 2**20


def test_an_argument_that_nobody_knows_is_refused():
    with pytest.raises(TypeError, match="capture_mb"):
        LLM("nowhere", capture_mb=8)


def test_options_in_the_additional_config_are_those_of_the_engine():
    """`LLM` took the defaults in their place, in silence."""
    given = {"overflow": "drop", "capture_mib": 8, "max_capture_mib": None}
    arguments = engine_arguments({"additional_config": {"tllm": given}}, {"capture_mib": 16}, ())
    found = EngineOptions.from_config(arguments["additional_config"])
    assert (found.overflow, found.capture_mib, found.max_capture_mib) == ("drop", 16, None)
    assert EngineOptions.from_config({"tllm": None}) == EngineOptions()
    for wrong, told in (("drop", "give a dict of hook_points"), ({"over": 1}, r"options \['over'")):
        with pytest.raises(ValueError, match=told):
            engine_arguments({"additional_config": {"tllm": wrong}}, {}, ())


def test_an_argument_that_belongs_into_vllms_is_refused_where_it_stands():
    told = "no argument of from_engine_args; vLLM's belong into what it is given first. tLLM's own"
    with pytest.raises(TypeError, match=told):
        LLM.from_engine_args(None, max_model_len=8)


@pytest.mark.parametrize("name", ["encode", "embed", "classify", "score", "beam_search"])
def test_methods_that_stand_before_vllms_are_called_as_they_are(name):
    ours, theirs = getattr(LLM, name), getattr(vllm.LLM, name)
    assert ours is not theirs
    assert inspect.signature(ours) == inspect.signature(theirs)


@pytest.mark.parametrize("given", [-1, float("nan"), "10", True])
def test_a_time_that_no_result_can_be_waited_for_is_refused(given):
    with pytest.raises(ValueError, match=r"result_timeout_s=.*; give a number of seconds"):
        LLM("nowhere", result_timeout_s=given)


@pytest.mark.parametrize("name", ["consumers", "capture_consumers"])
def test_a_specification_alone_is_not_read_as_its_letters(name):
    with pytest.raises(ValueError, match="unknown consumer 'nobody' in 'nobody:x=1'"):
        LLM("nowhere", **{name: "nobody:x=1"})


def test_arguments_that_no_engine_takes_are_refused_with_the_nearest():
    """The sentence was Python's, of a class that nobody had named."""
    for given, near in (
        ("max_steering_config", "max_steering_configs"),
        ("max_num_seq", "max_num_seqs"),
    ):
        with pytest.raises(
            TypeError, match=f"'{given}' is no argument of an engine; .*mean .*{near}"
        ):
            LLM("no-model", **{given: 4})
        with pytest.raises(
            TypeError, match=f"'{given}' is no argument of an engine; .*mean .*{near}"
        ):
            asyncio.run(AsyncLLM.create("no-model", **{given: 4}))
    with pytest.raises(
        TypeError, match=r"'qqqq' is no argument of an engine; it takes what vllm\.LLM"
    ):
        LLM("no-model", qqqq=1)
