"""What steering may be asked, and how it is put together."""

import base64
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tllm.spec.groups import GroupUse, compose
from tllm.spec.methods import METHODS
from tllm.spec.selection import Selection
from tllm.spec.stretches import TokenChoice, configurations, most_configurations, steering_stretches
from tllm.spec.tiers import Tiers, parse_modules

V = [3.0, 0.0, 4.0]


def only(tiers):
    (entry,) = tiers
    return entry


@pytest.mark.parametrize(
    "vector",
    [
        V,
        tuple(V),
        np.array(V),
        np.array(V, np.float16),
        torch.tensor(V),
        torch.tensor(V).bfloat16(),
    ],
    ids=["list", "tuple", "float64", "float16", "torch", "bfloat16"],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_vectors_of_every_kind(vector, wrapped):
    entry = {"vector": vector, "scale": 2} if wrapped else vector
    found = only(Tiers.parse(vectors={"block_output": {"-1": entry}}))
    assert (found.point.value, found.layer) == ("post_block", -1)
    assert found.vector.tolist() == V
    assert found.coefficients.add == (2 if wrapped else 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_packed_vectors(dtype):
    rows = torch.tensor([V, [0.5, -1.0, 2.0]], dtype=getattr(torch, dtype))
    data = base64.b64encode(rows.view(torch.uint8).numpy().tobytes()).decode()
    packed = {"dtype": dtype, "shape": [2, 3], "layer_indices": [4, 7], "data": data}
    found = list(Tiers.parse(vectors={"mlp_out": {**packed, "scales": [1.0, 0.5]}}))
    assert [(e.layer, e.coefficients.add, e.vector.tolist()) for e in found] == [
        (4, 1.0, V),
        (7, 0.5, [0.5, -1.0, 2.0]),
    ]
    assert [e.layer for e in Tiers.parse(vectors={"mlp_out": rows.float().numpy()})] == [0, 1]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_arrays_may_be_transposed(dtype):
    """As the columns of a weight are taken."""
    columns = np.arange(12.0).reshape(3, 4).astype(dtype)
    for asked in (
        {"method": "low_rank", "rotation": columns.T, "weight": 2 * columns.T},
        {"method": "sae_features", "encoder": columns.T, "decoder": columns.T, "factor": [0] * 4},
        {"method": "k_steering", "weight1": columns[:, :3].T, "last_weight": columns.T}
        | {"target": [0]},
    ):
        straight = {
            key: np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
            for key, value in asked.items()
        }
        found, expected = (
            only(Tiers.parse(vectors={"post_block": {0: entry}})) for entry in (asked, straight)
        )
        assert found.digest == expected.digest


def test_a_point_without_layers_takes_the_vector_itself():
    assert only(Tiers.parse(vectors={"lm_head_in": V})).layer is None


def test_directions_are_normalised_and_vectors_are_not():
    for method in (name for name, of in METHODS.items() if "vector" in of.arrays):
        given = {"vector": V, "method": method, "value": 1.0, "factor": 2.0}
        allowed = {"vector", "method", *METHODS[method].parameters}
        entry = {k: x for k, x in given.items() if k in allowed}
        length = np.linalg.norm(only(Tiers.parse(vectors={"post_block": {0: entry}})).vector)
        assert math.isclose(length, 5.0 if method == "add" else 1.0, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "steering_vectors is empty"),
        ([1], "steering_vectors is list"),
        ({"middle": {0: V}}, "unknown hook point 'middle'"),
        ({"post_block": {}}, "steering_vectors['post_block'] is empty"),
        ({"post_block": np.zeros((0, 3))}, "steering_vectors['post_block'] has no rows"),
        ({"post_block": {"x": V}}, "'x' is not a layer"),
        ({"post_block": {1.5: V}}, "1.5 is not a layer"),
        ({"post_block": V}, "has shape [3]; give {layer: vector}"),
        (
            {"embed": {0: V}},
            "has the keys [0], but embed belongs to no layer; give the entry itself",
        ),
        (
            {"lm_head_in": {"-1": {"vector": V}}},
            "has the keys ['-1'], but lm_head_in belongs to no",
        ),
        ({"post_block": {0: [[1.0]]}}, "['post_block'][0] has shape [1, 1]"),
        ({"post_block": {0: [math.nan]}}, "NaN, infinite"),
        ({"post_block": {0: [math.inf]}}, "NaN, infinite"),
        ({"post_block": {0: [1e39]}}, "beyond float32"),
        ({"post_block": {0: "abc"}}, "give a list of numbers"),
        ({"post_block": {0: ["a"]}}, "not an array of numbers"),
        ({"post_block": {0: {"scale": 2}}}, "has no 'vector'"),
        ({"post_block": {0: {"vector": V, "scale": math.nan}}}, "['scale']=nan is not finite"),
        ({"post_block": {0: {"vector": V, "scale": "x"}}}, "['scale']='x' is not a number"),
        ({"post_block": {0: {"vector": V, "method": "push"}}}, "'push' is not known; choose one"),
        ({"post_block": {0: {"vector": V, "factor": 2}}}, "unknown keys ['factor']; add takes"),
        (
            {"post_block": {0: {"vector": [0, 0], "method": "ablate"}}},
            "all zeros, which is no direction",
        ),
        ({"post_block": {0: {"vector": V, "method": "project"}}}, "gives no value"),
        ({"post_block": {0: {"vector": V, "method": "multiply"}}}, "gives no factor"),
        ({"post_block": {0: {"vector": V, "positions": "some"}}}, "['positions']='some'"),
        ({"post_block": {"data": "", "shape": [1, 3]}}, "packed needs it"),
        (
            {
                "post_block": {
                    "data": "AA==",
                    "shape": [1, 3],
                    "dtype": "float32",
                    "layer_indices": [0],
                }
            },
            "has 1 bytes, but shape [1, 3] of float32 has 12",
        ),
        ({"post_block": {0: [1j]}}, "['post_block'][0] is not an array of numbers: complex128 is"),
        (
            {"post_block": {0: np.array(V, complex)}},
            "['post_block'][0] is not an array of numbers: complex128 is",
        ),
        ({"post_block": {0: torch.tensor(V, dtype=torch.complex64)}}, "complex64 is no kind"),
        ({"post_block": {0: [True, False]}}, "['post_block'][0][0] is True; give a number"),
        ({"post_block": {0: ["1", "2"]}}, "not an array of numbers"),
        (
            {"post_block": {0: np.array(["2020-01-01"], "datetime64[D]")}},
            "datetime64[D] is no kind of real number",
        ),
        (
            {"post_block": {0: torch.ones(3, device="meta")}},
            "['post_block'][0] is not an array of numbers: ",
        ),
        (
            {"post_block": {0: torch.ones(3).to_sparse()}},
            "['post_block'][0] is not an array of numbers: ",
        ),
        ({"post_block": {0: {"vector": V, "scale": True}}}, "['scale']=True is not a number"),
        ({"post_block": {0: {"vector": V, "scale": "2"}}}, "['scale']='2' is not a number"),
        ({"post_block": {0: {"vector": V, "scale": 1j}}}, "['scale']=1j is not a number"),
        ({"post_block": {0: {"vector": V, "scale": 10**400}}}, "is beyond the 64 bits"),
        ({"post_block": {0: {"vector": V, "scale": 1e39}}}, "is beyond float32"),
        ({"post_block": {0: {"vector": V, "method": ["add"]}}}, "['method']=['add'] is not known"),
        ({"post_block": {0: {"vector": V, "positions": {"phase": ["any"]}}}}, "['phase']=['any']"),
    ],
)
def test_mistakes_in_vectors_are_refused_with_the_field(given, says):
    with pytest.raises(ValueError) as refused:
        Tiers.parse(vectors=given, names={"vectors": "steering_vectors"})
    assert "steering_vectors" in str(refused.value)
    assert says in str(refused.value)


def packed(**given):
    rows = np.array([V], np.float32)
    data = base64.b64encode(rows.tobytes()).decode()
    return {"dtype": "float32", "shape": [1, 3], "layer_indices": [4], "data": data, **given}


FORMS_OF_ENTRIES = {
    "bare": lambda vector: vector,
    "mapping": lambda vector: {"vector": vector},
    "listed": lambda vector: [{"vector": vector, "method": "add"}],
    "direction": lambda vector: [{"vector": vector, "method": "norm_match", "scale": 2}],
    "tensor": lambda vector: {"vector": torch.from_numpy(vector), "scale": 0.5},
}


@pytest.mark.parametrize("form", FORMS_OF_ENTRIES)
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (np.array([1, math.nan, 2, 3], np.float32), "has values that are NaN, infinite"),
        (np.array([1, math.inf, 2, 3], np.float32), "has values that are NaN, infinite"),
        (np.array([1, -math.inf, 2, 3], np.float32), "has values that are NaN, infinite"),
        (np.array([-math.nan] * 4, np.float32), "has values that are NaN, infinite"),
        (np.ones((1, 4), np.float32), r"has shape \[1, 4\]; give one vector \[hidden\]"),
        (np.zeros(0, np.float32), r"has shape \[0\]; give one vector \[hidden\]"),
        (np.array([True] * 4), "is not an array of numbers"),
    ],
)
def test_a_bad_vector_among_good_ones_is_the_one_that_is_named(form, bad, says):
    entry = FORMS_OF_ENTRIES[form]
    layers = {layer: entry(np.full(4, layer + 1, np.float32)) for layer in range(8)}
    assert len([*Tiers.parse(vectors={"post_block": layers})]) == 8
    layers[5] = entry(bad)
    with pytest.raises(ValueError, match=rf"^field\['post_block'\]\[5\] {says}"):
        Tiers.parse(vectors={"mlp_out": {1: V}, "post_block": layers}, names={"vectors": "field"})


def test_entries_that_are_read_together_are_what_each_is_alone():
    generator = np.random.default_rng(0)
    positions = {"ranges": [[1, 2]]}
    when = {"probe": {"hook": "pre_attn", "layer": 0, "vector": V}, "above": 0.0}
    says = [
        {},
        {},
        {"scale": 2.0},
        {"when": None},
        {"scale": 2.0},
        {"positions": None},
        {"scale": -0.0},
        {"scale": 0.0},
        {"method": "norm_match"},
        {"method": "norm_match"},
        {"positions": positions},
        {"positions": positions},
        {"positions": "last_prompt"},
        {"when": when},
        {"when": when},
        {"method": "clamp", "max": 1.0},
        {"method": "clamp", "max": 2.0},
        {"scale": 1.0, "method": "add"},
        {"method": "add", "scale": 1.0},
        {},
    ]
    given = [{"vector": generator.standard_normal(3, dtype=np.float32)} | each for each in says]
    together = [*Tiers.parse(vectors={"mlp_in": {3: given}})]
    alone = [only(Tiers.parse(vectors={"mlp_in": {3: each}})) for each in given]
    listed = [{**each, "vector": each["vector"].tolist()} for each in given]
    for others in (alone, Tiers.parse(vectors={"mlp_in": {3: listed}})):
        for ours, theirs in zip(together, others, strict=True):
            assert ours.key == theirs.key
            assert ours.coefficients.content == theirs.coefficients.content
            assert (ours.name, ours.largest, ours.reach) == (
                theirs.name,
                theirs.largest,
                theirs.reach,
            )
            assert ours.vector.tolist() == theirs.vector.tolist()
            assert not ours.vector.flags.writeable


def test_what_is_read_is_another_array_than_what_was_given():
    given = {layer: np.full(3, 1 + layer, np.float32) for layer in range(3)}
    for form in FORMS_OF_ENTRIES.values():
        found = [*Tiers.parse(vectors={"mlp_in": {at: form(each) for at, each in given.items()}})]
        for entry, each in zip(found, given.values(), strict=True):
            assert not np.shares_memory(entry.vector, each)
            assert each.flags.writeable


def test_vectors_that_differ_in_one_bit_have_other_digests():
    vector = np.zeros(3584, np.float32)
    vectors = [vector]
    for place in (0, 1, 255, 256, 2047, 2048, 3583):
        for bit in (0, 31):
            other = vector.copy()
            other.view(np.uint32)[place] |= np.uint32(1 << bit)
            vectors.append(other)
    found = [*Tiers.parse(vectors={"mlp_in": dict(enumerate([*vectors, vector.copy()]))})]
    digests = [entry.digest for entry in found]
    assert digests[0] == digests[-1]
    assert len({*digests}) == len(vectors)
    groups = [compose([Tiers.parse(vectors={"mlp_in": {0: each}})]) for each in vectors[1:]]
    assert len({group.digest for (group,) in groups}) == len(vectors) - 1


@pytest.mark.parametrize("scales", [[0.0], (0.0,), np.array([0.0]), torch.zeros(1)])
def test_packed_scales_are_what_was_given(scales):
    entry = only(Tiers.parse(vectors={"post_block": packed(scales=scales)}))
    assert entry.coefficients.add == 0


def test_a_condition_of_packed_vectors_is_read_once_as_that_of_others_is():
    when = {"probe": {"hook": "embed", "vector": [1.0, 0.0, 0.0]}, "above": 0.5}
    tiers = Tiers.parse(
        vectors={
            "post_block": packed(when=when),
            "mlp_out": packed(when=when),
            "attn_out": {4: {"vector": [1.0, 0.0, 0.0], "when": when}},
        }
    )
    found = [entry.when for _, entry in tiers.by_phase()]
    assert len(found) == 3 and found[0] is not None
    assert found[0] is found[1] is found[2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"scales": []}, "1 layer_indices and 0 scales"),
        ({"scales": 2.0}, "['scales']=2.0 is float; give a list"),
        ({"scales": ["x"]}, "[4]['scale']='x' is not a number"),
        ({"layer_indices": [2.9]}, "2.9 is not a layer"),
        ({"layer_indices": [True]}, "True is not a layer"),
        ({"layer_indices": 4}, "['layer_indices']=4 is int; give a list"),
        ({"layer_indices": "4"}, "['layer_indices']='4' is str; give a list"),
        ({"shape": 3}, "['shape']=3 is int; give a list"),
        ({"shape": ["1", "3"]}, "['shape']: '1' is not a whole number"),
        ({"shape": [-1, -3]}, "shape is [layers, hidden]"),
        ({"shape": [1, 3, 1]}, "shape is [layers, hidden]"),
        ({"dtype": ["float32"]}, "['dtype']=['float32'] is not known"),
        ({"dtype": None}, "['dtype']=None is not known"),
        ({"data": 12}, "['data'] is int; give base64 text, or bytes"),
        ({"data": [0] * 12}, "['data'] is list; give base64 text, or bytes"),
        ({"data": "?" * 16}, "['data'] is not base64"),
        ({"positions": {}, "place": 1}, "unknown keys ['place']"),
    ],
)
def test_mistakes_in_the_packed_form_are_refused_with_the_field(given, says):
    with pytest.raises(ValueError) as refused:
        Tiers.parse(vectors={"post_block": packed(**given)}, names={"vectors": "steering_vectors"})
    assert "steering_vectors['post_block']" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("clamp", "says"),
    [
        ({"value": 1, "min": 0}, "gives both value and min or max"),
        ({}, "gives no bound"),
        ({"min": 2, "max": 1}, "min=2.0 above max=1.0"),
        ({"max": math.inf}, "not finite"),
        ({"value": 1e39}, "beyond float32"),
    ],
)
def test_mistakes_in_clamps_are_refused_with_the_field(clamp, says):
    with pytest.raises(ValueError) as refused:
        Tiers.parse(clamps={"post_block": {3: {"vector": V, **clamp}}})
    assert "clamps['post_block'][3]" in str(refused.value)
    assert says in str(refused.value)


def test_composition_puts_all_vectors_before_all_clamps_and_keeps_the_order():
    everywhere = Tiers.parse(
        vectors={"post_block": {1: V}},
        decode_vectors={"post_block": {1: V}},
        clamps={"post_block": {1: {"vector": V, "value": 0}}},
    )
    own = Tiers.parse(
        vectors={"post_block": {1: [{"vector": V, "method": "ablate"}, {"vector": V, "scale": 9}]}}
    )
    groups = compose([everywhere, own])
    assert [(g.phase, len(g.operations)) for g in groups] == [
        ("any", 1),
        ("decode", 1),
        ("any", 3),
    ]
    assert [c.add for *_, c in groups[2].operations] == [0, 9, 0]
    assert groups[0].digest == groups[1].digest, "a group is known by what it does, not to whom"


def test_no_effect_is_no_steering():
    assert compose([Tiers.parse(vectors={"post_block": {1: {"vector": V, "scale": 0}}})]) == ()
    assert compose([Tiers.parse(vectors={"post_block": {1: V}}).scaled(0)]) == ()


def test_a_condition_that_entries_share_is_read_once():
    def when(above=0.5):
        return {"probe": {"hook": "post_block", "layer": 0, "vector": V}, "above": above}

    class Anew(dict):
        """Each look finds another object, which is gone when the next one is made."""

        def get(self, key, default=None):
            return (
                when(above=float(self["vector"][0])) if key == "when" else super().get(key, default)
            )

    one = when()
    shared = {layer: {"vector": V, "when": one} for layer in range(4)}
    anew = {layer: Anew(vector=[float(layer), 1.0], when=None) for layer in range(4)}
    tiers = Tiers.parse(vectors={"post_block": shared}, decode_vectors={"mlp_out": shared})
    assert len({id(entry.when) for entry in tiers}) == 1
    found = [entry.when.edges.low for entry in Tiers.parse(vectors={"post_block": anew})]
    assert found == [0.0, 1.0, 2.0, 3.0]


def test_conditions_of_what_has_no_effect_are_judged():
    def at(layer, scale=0, **more):
        probe = {"hook": "post_block", "layer": 0, "vector": V}
        when = {"probe": probe, "above": more.pop("above", 0.5)}
        return {
            layer: {"vector": V, "scale": scale, "when": {**when, **more.pop("when", {})}, **more}
        }

    def composed(entries, phase=""):
        return compose([Tiers.parse(**{f"{phase}vectors": {"post_block": entries}})])

    for phase, meant in (("", "any"), ("decode_", "decode")):
        [group] = composed(at(1, positions=[4, 5]), phase)
        assert (group.phase, group.operations, group.ends) == (meant, (), ())
        assert group.positions == Selection.parse([4, 5])
        assert len(group.gates.judged) == 1
        assert not group.use.changes_rows
    [of_prompt] = composed(at(1, when={"over": "prompt_mean"}))
    assert of_prompt.use.judges_for_later
    for scope in ("next", "rest"):
        [remembers] = composed(at(1, when={"scope": scope}))
        assert remembers.use.judges_for_later and not remembers.use.changes_rows
    assert not composed(at(1))[0].use.judges_for_later
    steers, also = composed({**at(1, scale=2), **at(2, above=0.7)})
    assert steers.digest == composed(at(1, scale=2))[0].digest, "it shares what it did"
    assert [gate.low for gate in also.gates.judged] == [0.7]
    assert len(composed({**at(1, scale=2), **at(2, positions=[4])})) == 1
    _, everywhere = composed({**at(1, scale=2, positions=[4]), **at(2)})
    assert everywhere.positions.everything, "beyond what it steers"
    both = {"vectors": at(1, scale=2, positions=[4]), "decode_vectors": at(2, positions=[4])}
    fields = {field: {"post_block": entries} for field, entries in both.items()}
    assert len(compose([Tiers.parse(**fields)])) == 1, "steered there in every phase"


def test_stretches_follow_phases_and_selections():
    tiers = Tiers.parse(
        prefill_vectors={"post_block": {1: V}},
        decode_vectors={"post_block": {1: {"vector": V, "positions": {"windows": [[6, 8]]}}}},
    )
    prefill, decode = (group.use for group in compose([tiers]))
    assert steering_stretches([prefill, decode], 5, []) == [
        (0, (prefill.digest,)),
        (5, ()),
        (6, (decode.digest,)),
        (8, ()),
    ]
    assert most_configurations([prefill, decode]) == 1  # the same groups in both phases


def test_what_is_done_to_generated_tokens_may_depend_on_which_they_are():
    def tier(scale, **positions):
        return {"post_block": {1: {"vector": V, "scale": scale, "positions": positions}}}

    tiers = Tiers.parse(
        vectors=tier(1, token_ids=[3, 5], exclude={"positions": [-1]}),
        prefill_vectors=tier(2, token_ids=[1]),
        decode_vectors=tier(3, exclude={"token_ids": [5, 9]}),
    )
    uses = [group.use for group in compose([tiers])]
    named, prompt, others = (use.digest for use in uses)
    found = steering_stretches(uses, 4, [3, 1, 8, 3])
    by_token = ((3, (named, others)), (5, (named,)), (9, ()))
    assert found == [
        (0, (named,)),
        (1, (prompt,)),
        (2, ()),
        (4, TokenChoice(by_token, (others,))),
    ]
    assert configurations(found) == {(), (named,), (prompt,), (others,), (named, others)}
    assert most_configurations(uses) >= 4


def uses_at(*positions):
    """Groups that differ in what they do, at these positions."""
    return [GroupUse("any", Selection.parse(each), str(n)) for n, each in enumerate(positions)]


def test_no_token_has_the_groups_of_two_single_positions():
    """Thirteen of them were said to need 8192 configurations."""
    assert most_configurations(uses_at(*([n] for n in range(40)))) == 40
    assert most_configurations(uses_at(*([-n] for n in range(1, 41)))) == 40
    assert most_configurations(uses_at([0, 1], [1, 2], "all")) == 4  # all; with one; other; both
    assert most_configurations(uses_at([0], [-1])) == 3  # the prompt may have one token
    assert most_configurations(uses_at("all_prompt", "all_generated")) == 2
    assert most_configurations(uses_at(*({"token_ids": [n]} for n in range(13)))) == 2**14


@pytest.mark.parametrize("seed", range(30))
def test_no_request_needs_more_configurations_than_were_counted(seed):
    chosen = random.Random(seed)
    forms = [
        *([n] for n in range(3)),
        *([-n] for n in range(1, 3)),
        *([0, 2], [1, -1], "all", "all_prompt", "all_generated"),
        {"positions": [1, 3], "phase": "generation"},
        {"ranges": [[1, 4]], "exclude": {"positions": [-1]}},
        {"token_ids": [1]},
        {"positions": [0], "token_ids": [2]},
    ]
    uses = [
        GroupUse(chosen.choice(["any", "prefill", "decode"]), Selection.parse(form), str(number))
        for number, form in enumerate(chosen.sample(forms, 5))
    ]
    needed = set()
    for length in range(1, 7):
        for tokens in itertools.product((0, 1, 2), repeat=length):
            needed |= configurations(steering_stretches(uses, length, tokens))
    assert len(needed - {()}) <= most_configurations(uses) <= 2 ** len(uses) * 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("calm", (("calm", 1.0),)),
        (("calm", 2), (("calm", 2.0),)),
        (["calm", ("kind", -1.5)], (("calm", 1.0), ("kind", -1.5))),
        (("calm", "kind"), (("calm", 1.0), ("kind", 1.0))),
    ],
)
def test_module_references(given, expected):
    assert parse_modules(given) == expected


@pytest.mark.parametrize("given", [3, [], ("calm", math.nan), ("calm", True), [3], {}])
def test_mistaken_module_references(given):
    with pytest.raises(ValueError, match="steering_module_ref"):
        parse_modules(given)


def test_a_path_in_the_place_of_vectors_is_told_who_reads_it():
    for path in ("happy.gguf", Path("happy.gguf")):
        with pytest.raises(
            ValueError, match=r"vectors is .*; a file is read by tllm.steering.load"
        ):
            Tiers.parse(vectors=path)
