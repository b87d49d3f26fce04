"""Bad configurations and options are refused with a sentence that names the field."""

import pickle

import numpy as np
import pytest
import torch

from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig, from_options


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("rank", 0),
        ("rank", True),
        ("slots", 0),
        ("slots", 1.5),
        ("width", -1),
        ("train_every_n_steps", 0),
        ("source_layer", "first"),
        ("seed", None),
        ("beta", float("nan")),
        ("beta", "0.1"),
        ("lr", 0),
        ("eps", -1e-8),
        ("weight_decay", -1),
        ("betas", (0.9, 1.0)),
        ("betas", 0.9),
        ("scope", "sample"),
        ("on_full", "raise"),
        ("persist", 1),
        ("guide", "yes"),
        ("target_site", "attn_out"),
    ],
)
def test_a_bad_configuration_names_the_field_and_what_was_given(field, given):
    with pytest.raises(ValueError, match=field) as error:
        ESampConsumerConfig(**{field: given})
    assert repr(given) in str(error.value)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("rank", 65536),
        ("slots", 65536),
        ("width", 4194304),
        ("train_every_n_steps", 1048576),
        ("seed", 2**63 - 1),
    ],
)
def test_sizes_that_no_machine_has_room_for_are_refused_at_once(field, most):
    """They failed when the workers made the distillers."""
    assert getattr(ESampConsumerConfig(**{field: most}), field) == most
    for given in (most + 1, 10**30):
        with pytest.raises(ValueError, match=rf"{field}={given} must be from -?\d+ to {most}$"):
            ESampConsumerConfig(**{field: given})


def test_an_unknown_hook_point_is_refused():
    with pytest.raises(ValueError, match="unknown hook point 'nowhere'"):
        ESampConsumerConfig(source_site="nowhere")


def test_learning_a_row_from_itself_is_refused():
    with pytest.raises(ValueError, match="nothing to learn"):
        ESampConsumerConfig(source_layer=3, target_layer=3, target_site="post_block")


def test_any_target_may_be_learned_when_nothing_is_guided():
    assert ESampConsumerConfig(target_site="attn_output", guide=False).target_site == "attn_out"


@pytest.mark.parametrize(
    "options",
    [{}, {"enabled": False}, {"beta": 0.3, "group": "x", "train": False}, {"beta": -1}],
)
def test_good_options_are_accepted(options):
    ESampConsumer().validate_options(options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bta": 0.3}, r"unknown options \['bta'\]; it takes enabled, beta, group, train"),
        ({"beta": "high"}, r"beta='high' is not a number"),
        ({"beta": float("inf")}, r"beta=inf is not finite"),
        ({"beta": True}, r"beta=True is not a number"),
        ({"group": ""}, r"group=''.*non-empty string"),
        ({"group": 3}, r"group=3.*non-empty string"),
        ({"train": 1}, r"train=1.*True or False"),
        ({"enabled": None}, r"enabled=None.*True or False"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ESampConsumer().validate_options(options)


def test_flows_follow_the_configuration():
    predict, train = ESampConsumer().flows()
    assert (predict.window, train.window) == ("same_step", "out_of_band")
    assert {read.role for read in predict.reads} == {"source"}
    assert {read.role for read in train.reads} == {"source", "target"}
    (only,) = ESampConsumer(ESampConsumerConfig(guide=False)).flows()
    assert only.window == "out_of_band"
    (only,) = ESampConsumer(ESampConsumerConfig(train=False)).flows()
    assert only.window == "same_step"
    train = ESampConsumer(ESampConsumerConfig(train_every_n_steps=4)).flows()[1]
    assert (train.dispatch_every_n_steps, train.delivery) == (4, "bundle")


def test_a_consumer_travels_to_workers():
    config = ESampConsumerConfig(rank=8, betas=[0.8, 0.9])
    assert pickle.loads(pickle.dumps(ESampConsumer(config))).config == config


def test_spec_strings_set_the_configuration_and_refuse_what_it_lacks():
    assert from_options(beta=0.3, rank=32).config == ESampConsumerConfig(beta=0.3, rank=32)
    with pytest.raises(ValueError, match=r"no options \['rnk'\].*rank"):
        from_options(rnk=32)


def test_numbers_of_numpy_are_numbers():
    config = ESampConsumerConfig(rank=np.int64(8), beta=np.float32(0.5), lr=np.float32(0.25))
    assert (config.rank, config.beta, config.lr) == (8, 0.5, 0.25)
    assert type(config.rank) is int
    small = np.float32(0.5)
    others = {"eps": small, "weight_decay": small, "betas": [small, small]}
    config = ESampConsumerConfig(lr=torch.tensor(0.25), **others)
    numbers = [config.lr, config.eps, config.weight_decay, *config.betas]
    assert numbers == [0.25, *[0.5] * 4] and {*map(type, numbers)} == {float}


@pytest.mark.parametrize("given", [0.3, {"beta": 0.3}, ESampConsumerConfig])
def test_what_is_no_configuration_is_refused(given):
    with pytest.raises(TypeError, match=r"config=.*give ESampConsumerConfig\(\.\.\.\)"):
        ESampConsumer(given)
