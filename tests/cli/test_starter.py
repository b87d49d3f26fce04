from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import starter  # noqa: E402

pytestmark = pytest.mark.skipif(
    not starter.current_platform.is_cpu(), reason="speaks of a machine without a GPU"
)


EVERY_FLAG = """
--model-name m --prompt p --num-answers 4 --max-new-tokens 9 --dtype float16
--gpu-memory-utilization 0.5 --max-model-len 64 --temperature 0.7 --top-p 0.9 --top-k 5
--min-p 0.2 --seed 1 --seed-mode per-request
--source-layer-path model.model.layers[1].input_layernorm
--target-layer-path model.model.layers[-1] --graph-scratch-rows 64
--distiller-hidden-dim 32 --distiller-lr 0.01 --model-bank-slots 2 --model-bank-rank 32
--model-bank-flush-interval 2 --model-bank-forward-backend torch
--no-model-bank-train-cudagraph --no-enable-distiller-intervention --distiller-beta 0.3
--distiller-sampler-backend post_filter_exact
"""


def test_every_flag_of_the_original_is_known() -> None:
    arguments = starter.parse_arguments(shlex.split(EVERY_FLAG))
    config = starter.esamp_config(arguments)
    assert (config.source_layer, config.source_site) == (1, "pre_attn")
    assert (config.target_layer, config.target_site) == (-1, "post_block")
    assert (config.rank, config.lr, config.slots, config.beta) == (32, 0.01, 2, 0.3)
    assert config.train_every_n_steps == 2
    assert not config.guide
    assert not config.cuda_graph


def test_defaults_are_those_of_the_original() -> None:
    arguments = starter.parse_arguments([])
    assert (arguments.num_answers, arguments.max_new_tokens, arguments.dtype) == (
        16,
        128,
        "bfloat16",
    )
    assert (arguments.temperature, arguments.top_p, arguments.top_k, arguments.min_p) == (
        0.8,
        0.95,
        -1,
        0.1,
    )
    assert (arguments.seed, arguments.seed_mode, arguments.max_model_len) == (2026, "shared", 512)
    assert starter.esamp_config(arguments) == starter.ESampConsumerConfig(beta=0.8)
    assert arguments.model_name == str(starter.DEMO_MODEL)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.model.layers[0].input_layernorm", (0, "pre_attn")),
        ("model.layers[3].self_attn", (3, "attn_out")),
        ("layers[-2].post_attention_layernorm", (-2, "post_attn")),
        ("model.model.layers[5].mlp", (5, "mlp_out")),
        ("model.model.layers[5]", (5, "post_block")),
        ("model.model.norm", (-1, "lm_head_in")),
    ],
)
def test_a_module_path_names_a_hook_point(path: str, expected: tuple[int, str]) -> None:
    assert starter.layer_and_site(path) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--distiller-hidden-dim 256", "a distiller here has one width"),
        ("--model-bank-forward-backend triton_grouped", "does not run without a GPU"),
        ("--model-bank-train-cudagraph", "needs a GPU"),
        ("--distiller-sampler-backend pre_filter_dense", "invalid choice"),
        ("--source-layer-path model.model.embed_tokens", "is no hook point"),
        ("--target-layer-path model.model.layers[3].mlp", "target_site='mlp_out' cannot guide"),
        ("--num-answers 0", "must be 1 or more"),
        ("--graph-scratch-rows -1", "must be 0 or more"),
        ("--model-bank-rank 0", "rank=0 must be from 1 to 65536"),
    ],
)
def test_a_value_without_a_meaning_is_refused_with_a_sentence(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        starter.parse_arguments(flags.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


FLAGS = "--max-new-tokens 8 --num-answers 4 --dtype float32 --graph-scratch-rows 8"


def assert_trained(output: str) -> None:
    """One optimiser step for each of the 7 decode steps: all answers share one distiller."""
    figures = dict(line.split()[:2] for line in output.splitlines() if line[:2] == "  ")
    assert figures["loss_count"] == "7"
    assert figures["rows_trained"] == "28"


def test_the_starter_answers_and_trains(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        assert starter.main([*FLAGS.split(), "--seed-mode", "shared"]) == 0
    finally:
        starter.clear_consumers()
    assert_trained(capfd.readouterr().out)


def test_as_a_user_runs_it_with_a_seed_for_each_request(run: Callable[..., Any]) -> None:
    status, text = run(ROOT / "starter.py", *FLAGS.split(), "--seed-mode", "per-request")
    assert status == 0, text
    assert_trained(text)
