"""The resolver on small stand-in models; `tests/oracle` holds the table against real ones."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tllm.models import resolve
from tllm.models.families import FAMILIES, Family
from tllm.models.sites import Argument
from tllm.spec.hooks import HEAD_POINTS, HeadSplit, HookPoint, ModelPoints

LAYERS = 3
HIDDEN = 8


FOUND = HookPoint.Q, HookPoint.K, HookPoint.V, HookPoint.ROUTER
"""Points that are found in the model, and in no table."""
ALL = tuple(point for point in HookPoint if point not in FOUND)
"""Of a model without experts."""


class Norm(nn.Module):
    """Like vLLM's: its forward takes `*args`, and adds the residual when it is given one."""

    def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if len(args) == 1:
            return args[0].tanh()
        stream = args[0] + args[1]
        return stream.tanh(), stream


class Attention(nn.Module):
    """Named as vLLM's module around the kernel."""

    num_heads = 2


class Kernel(Attention):
    """It is given queries of two heads, and keys and values of one."""

    num_kv_heads, head_size = 1, 4

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + key.repeat(1, 2) + value.repeat(1, 2)


class Wide(nn.Linear):
    """Its heads are not as wide as the stream."""

    def __init__(self) -> None:
        super().__init__(2 * HIDDEN, HIDDEN)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.o_proj = Attention(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.o_proj(hidden_states * 0.5)


class MLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.25


class Block(nn.Module):
    """Moves its stream as `vllm`'s LlamaDecoderLayer does."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = SelfAttention(), MLP()

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):  # type: ignore[no-untyped-def]
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class ScaledBlock(Block):
    """Has Llama's parts, but scales its MLP branch."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):  # type: ignore[no-untyped-def]
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return hidden_states * 0.22, residual


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm: nn.Module = Norm()

    def forward(self, positions: Tensor, inputs_embeds: Tensor) -> Tensor:
        hidden_states, residual = inputs_embeds, None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class StackThatAddsBetweenBlocks(Stack):
    """As Qwen3-VL does with the features of an image."""

    def forward(self, positions: Tensor, inputs_embeds: Tensor) -> Tensor:
        hidden_states, residual = inputs_embeds, None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
            hidden_states = hidden_states + inputs_embeds
        return self.norm(hidden_states, residual)[0]


class PPMissingLayer(nn.Identity):
    """Named as vLLM's placeholder for a module on another pipeline rank."""


class CausalLM(nn.Module):
    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.model = stack
        text = SimpleNamespace(hidden_size=HIDDEN, num_hidden_layers=LAYERS, model_type="newcomer")
        self.config = SimpleNamespace(get_text_config=lambda: text)


class Wrapper(nn.Module):
    """A multimodal model around a language model."""

    def __init__(self, language_model: CausalLM) -> None:
        super().__init__()
        self.tower = Stack(ScaledBlock)
        self.language_model = language_model
        self.config = language_model.config

    def get_language_model(self) -> CausalLM:
        return self.language_model


def test_unlisted_model_that_computes_as_llama_has_every_point() -> None:
    sites = resolve(CausalLM(Stack()))
    assert sites.points.points == ALL
    assert sites.points.family == "Stack (like llama)"
    assert (sites.points.num_layers, sites.hidden_size) == (LAYERS, HIDDEN)


@pytest.mark.parametrize("module", ["llama", "plugin.llama", "transformers_modules.mine.llama"])
def test_model_with_the_names_of_a_row_is_looked_at_all_the_same(module: str) -> None:
    stack, block = (
        type(name, (cls,), {"__module__": module, "forward": cls.forward})
        for name, cls in {"LlamaModel": Stack, "LlamaDecoderLayer": ScaledBlock}.items()
    )
    points = resolve(CausalLM(stack(block))).points
    assert points.points == () and "its block computes" in points.reasons["post_block"]


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        (Stack(ScaledBlock), "its block computes"),
        (StackThatAddsBetweenBlocks(), "does more than chain the blocks"),
        (nn.Linear(HIDDEN, HIDDEN), "not in the table"),
    ],
)
def test_unlisted_model_that_differs_has_no_point_and_says_why(
    stack: nn.Module, reason: str
) -> None:
    sites = resolve(CausalLM(stack))
    assert sites.points.points == () and not sites.sites
    assert all(reason in why for why in sites.points.reasons.values())
    with pytest.raises(ValueError, match=reason):
        sites.points.locate(HookPoint.MLP_IN, 0)


def test_language_model_of_a_multimodal_wrapper_is_found() -> None:
    assert resolve(Wrapper(CausalLM(Stack()))).points.points == ALL


def test_sites_are_in_the_order_the_forward_pass_reaches_them() -> None:
    model = CausalLM(Stack())
    sites = resolve(model).sites
    reached: list[object] = []
    for key, site in sites.items():
        if site.side == "input":
            site.module.register_forward_pre_hook(lambda *_, key=key: reached.append(key))
        else:
            site.module.register_forward_hook(lambda *_, key=key: reached.append(key))
    model.model(torch.zeros(2), torch.zeros(2, HIDDEN))
    assert reached == list(sites)


def test_norm_that_reads_a_stream_next_is_named() -> None:
    stack = Stack()
    norms = {key: site.norm for key, site in resolve(CausalLM(stack)).sites.items() if site.norm}
    last = LAYERS - 1
    assert norms == {
        **{(HookPoint.POST_ATTN, i): stack.layers[i].post_attention_layernorm for i in range(3)},
        **{(HookPoint.POST_BLOCK, i): stack.layers[i + 1].input_layernorm for i in range(last)},
        (HookPoint.POST_BLOCK, last): stack.norm,
    }


class StackWithoutFinalNorm(Stack):
    """Has a norm, and leaves it to others to call it."""

    def forward(self, positions: Tensor, inputs_embeds: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden_states, residual = inputs_embeds, None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return hidden_states, residual


def test_final_norm_that_the_stack_does_not_call_is_not_named() -> None:
    sites = resolve(CausalLM(StackWithoutFinalNorm())).sites
    assert sites[HookPoint.POST_BLOCK, LAYERS - 1].norm is None
    assert sites[HookPoint.POST_BLOCK, LAYERS - 2].norm is not None


def test_norm_on_the_next_pipeline_rank_is_not_named() -> None:
    stack = Stack()
    stack.layers[2], stack.norm = PPMissingLayer(), PPMissingLayer()
    row = Family("here", f"{__name__}:Stack", f"{__name__}:Block", FAMILIES[0].layout)
    sites = resolve(CausalLM(stack), families=[row]).sites
    assert sites[HookPoint.POST_BLOCK, 0].norm is stack.layers[1].input_layernorm
    assert sites[HookPoint.POST_BLOCK, 1].norm is None


def test_stream_and_residual_of_a_call_are_found_by_position_and_by_keyword() -> None:
    site = resolve(CausalLM(Stack())).sites[HookPoint.EMBED, None]
    positions, stream, residual = torch.zeros(3, 1)
    calls = [
        ((positions, stream, residual), {}),
        ((positions,), {"residual": residual, "hidden_states": stream}),
    ]
    for args, kwargs in calls:
        assert site.stream.get(args, kwargs) is stream
        assert site.residual.get(args, kwargs) is residual
        other = torch.ones(1)
        args, kwargs = site.stream.replace(args, kwargs, other)
        assert site.stream.get(args, kwargs) is other
        assert site.residual.get(args, kwargs) is residual
    assert site.residual.get((positions, stream), {}) is None


def test_what_leaves_a_block_and_enters_the_next_is_one_site() -> None:
    sites = resolve(CausalLM(Stack()))
    assert sites.points.canonical(HookPoint.PRE_ATTN, 2) == sites.points.canonical(
        HookPoint.POST_BLOCK, 1
    )
    assert sites.points.canonical(HookPoint.PRE_ATTN, 0) == (HookPoint.EMBED, None)
    assert sites.points.canonical(HookPoint.POST_BLOCK, -1) == (HookPoint.POST_BLOCK, LAYERS - 1)
    assert sites.points.canonical(HookPoint.PRE_ATTN, -LAYERS) == (HookPoint.EMBED, None)
    assert (HookPoint.PRE_ATTN, 1) not in sites.sites


@pytest.mark.parametrize(
    ("point", "layer", "message"),
    [
        (HookPoint.MLP_IN, LAYERS, "from 0 to 2"),
        (HookPoint.MLP_IN, None, "needs a layer"),
        (HookPoint.LM_HEAD_IN, 0, "belongs to no layer"),
    ],
)
def test_layer_that_a_point_lacks_is_refused(
    point: HookPoint, layer: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(CausalLM(Stack())).points.canonical(point, layer)


def test_pipeline_rank_holds_the_sites_of_its_own_blocks_only() -> None:
    stack = Stack()
    stack.layers[2] = PPMissingLayer()
    stack.norm = PPMissingLayer()
    row = Family("here", f"{__name__}:Stack", f"{__name__}:Block", FAMILIES[0].layout)
    sites = resolve(CausalLM(stack), families=[row])
    assert {layer for _, layer in sites.sites} == {None, 0, 1}
    assert (HookPoint.LM_HEAD_IN, None) not in sites.sites
    assert sites.points.num_layers == LAYERS
    assert HookPoint.LM_HEAD_IN in sites.points.points
    assert sites.points.canonical(HookPoint.PRE_ATTN, 2) in sites.sites


def test_partial_sums_are_refused_under_tensor_parallelism() -> None:
    parallel = next(row for row in FAMILIES if row.name == "cohere").layout
    row = Family("here", f"{__name__}:Stack", f"{__name__}:Block", parallel)
    assert HookPoint.ATTN_OUT in resolve(CausalLM(Stack()), 1, families=[row]).points.points
    sites = resolve(CausalLM(Stack()), 2, families=[row])
    assert HookPoint.ATTN_OUT not in sites.points.points
    assert "tensor_parallel_size=2" in sites.points.reasons["attn_out"]
    with pytest.raises(ValueError, match="it has: embed, pre_attn"):
        sites.points.locate(HookPoint.MLP_OUT, 1)


def test_row_holds_only_with_the_values_it_names() -> None:
    row = Family(
        "here",
        f"{__name__}:Stack",
        f"{__name__}:Block",
        FAMILIES[0].layout,
        block_is={"training": False},
    )
    sites = resolve(CausalLM(Stack()).train(), families=[row])
    assert "known only with {'training': False}" in sites.points.reasons["pre_attn"]
    assert resolve(CausalLM(Stack()).eval(), families=[row]).points.points == ALL


class MixerBlock(Block):
    """Has one branch only, as Nemotron-H's blocks have."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):  # type: ignore[no-untyped-def]
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


def hybrid() -> nn.Module:
    """Its middle block has no attention."""
    stack = Stack()
    stack.layers[1] = MixerBlock()
    return CausalLM(stack)


FULL = FAMILIES[0].layout
HYBRID = (
    Family("hybrid", f"{__name__}:Stack", f"{__name__}:Block", FULL),
    Family(
        "hybrid",
        f"{__name__}:Stack",
        f"{__name__}:MixerBlock",
        {p: "no attention here" if "attn" in p and p != "pre_attn" else FULL[p] for p in FULL},
    ),
)


def test_point_that_one_layer_lacks_is_refused_there_with_the_layers_that_have_it() -> None:
    sites = resolve(hybrid(), families=HYBRID)
    points = sites.points
    assert points.points == ALL
    assert points.layers(HookPoint.ATTN_OUT) == (0, 2)
    assert points.layers(HookPoint.MLP_OUT) == (0, 1, 2)
    assert points.check(HookPoint.ATTN_OUT, -1) == (HookPoint.ATTN_OUT, 2)
    refusal = r"no hook point attn_out in layer 1: no attention here \(layers that have it: 0, 2\)"
    with pytest.raises(ValueError, match=refusal):
        points.check(HookPoint.ATTN_OUT, 1)
    assert (HookPoint.ATTN_OUT, 1) not in sites.sites
    assert (HookPoint.ATTN_OUT, 0) in sites.sites and (HookPoint.MLP_OUT, 1) in sites.sites
    assert points.described()["layers"] == {
        point: [0, 2] for point in ("attn_in", "attn_heads", "attn_out", "post_attn")
    }


def test_pre_attn_has_a_tap_of_its_own_where_the_block_before_gives_nothing_up() -> None:
    silent = {**FULL, HookPoint.POST_BLOCK: "not known"}
    rows = (HYBRID[0], Family("silent", HYBRID[1].stack, HYBRID[1].block, silent))
    sites = resolve(hybrid(), families=rows)
    assert sites.points.canonical(HookPoint.PRE_ATTN, 2) == (HookPoint.PRE_ATTN, 2)
    assert sites.points.canonical(HookPoint.PRE_ATTN, 1) == (HookPoint.POST_BLOCK, 0)
    assert sites.second == {
        (HookPoint.EMBED, None): (HookPoint.PRE_ATTN, 0),
        (HookPoint.POST_BLOCK, 0): (HookPoint.PRE_ATTN, 1),
    }
    assert (HookPoint.PRE_ATTN, 2) in sites.sites and (HookPoint.PRE_ATTN, 1) not in sites.sites


def test_embed_is_where_the_first_block_is() -> None:
    stack = Stack()
    assert resolve(CausalLM(stack)).sites[HookPoint.EMBED, None].module is stack.layers[0]
    row = Family("here", f"{__name__}:Stack", f"{__name__}:Block", FAMILIES[0].layout)
    stack.layers[0] = PPMissingLayer()
    later = resolve(CausalLM(stack), families=[row])
    assert HookPoint.EMBED in later.points.points
    assert (HookPoint.EMBED, None) not in later.sites
    refused = {**FULL, HookPoint.PRE_ATTN: "not known"}
    row = Family("silent", f"{__name__}:Stack", f"{__name__}:Block", refused)
    points = resolve(CausalLM(Stack()), families=[row]).points
    with pytest.raises(ValueError, match="no hook point embed: not known"):
        points.check(HookPoint.EMBED, None)


def test_heads_are_known_where_they_are_as_wide_as_the_stream() -> None:
    stack = Stack()
    sites = resolve(CausalLM(stack))
    assert sites.sites[HookPoint.ATTN_HEADS, 1].module is stack.layers[1].self_attn.o_proj
    everywhere = [(HookPoint.ATTN_HEADS, layer) for layer in range(LAYERS)]
    assert sites.points.heads == dict.fromkeys(everywhere, HeadSplit(2, HIDDEN // 2))
    assert HeadSplit(2, 4).dimensions([1]) == (4, 5, 6, 7)
    stack.layers[1].self_attn.o_proj = Wide()
    points = resolve(CausalLM(stack)).points
    assert points.layers(HookPoint.ATTN_HEADS) == (0, 2)
    assert set(points.heads) == {everywhere[0], everywhere[2]}
    with pytest.raises(ValueError, match=r"2 heads of 8 are 16 numbers, .* the residual stream, 8"):
        points.check(HookPoint.ATTN_HEADS, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"o_proj": nn.Identity()}, "its output projection is not sure among its modules"),
        ({"dense": nn.Linear(HIDDEN, HIDDEN)}, r"not sure among \['self_attn.o_proj'"),
        ({"attn": nn.Identity()}, r"\(SelfAttention\) is no attention with heads"),
    ],
)
def test_heads_that_are_not_sure_are_refused(change: dict[str, nn.Module], reason: str) -> None:
    stack = Stack()
    for name, module in change.items():
        setattr(stack.layers[0].self_attn, name, module)
    points = resolve(CausalLM(stack)).points
    with pytest.raises(ValueError, match=reason):
        points.check(HookPoint.ATTN_HEADS, 0)
    assert points.check(HookPoint.ATTN_OUT, 0)


def test_heads_are_refused_where_ranks_share_them() -> None:
    row = Family("here", f"{__name__}:Stack", f"{__name__}:Block", FAMILIES[0].layout)
    points = resolve(CausalLM(Stack()), 2, families=[row]).points
    with pytest.raises(ValueError, match="tensor_parallel_size=2 every rank holds a part of the"):
        points.check(HookPoint.ATTN_HEADS, 0)


def test_points_without_a_tap_are_refused_with_how_to_get_one() -> None:
    points = resolve(CausalLM(Stack()), tapped=[HookPoint.PRE_ATTN]).points
    assert points.check(HookPoint.EMBED, None)  # the tap of pre_attn 0
    assert points.check(HookPoint.POST_BLOCK, 0)  # the tap of pre_attn 1
    with pytest.raises(ValueError, match=r"post_block has no tap .*it has pre_attn.*'post_block'"):
        points.check(HookPoint.POST_BLOCK, -1)


def test_pipeline_stages_together_know_what_every_layer_lacks() -> None:
    stages = []
    for here in ([0], [1, 2]):
        model = hybrid()
        for layer in {0, 1, 2}.difference(here):
            model.model.layers[layer] = PPMissingLayer()
        stages.append(resolve(model, families=HYBRID).points)
    assert stages[0].layers(HookPoint.ATTN_OUT) == (0, 1, 2)
    for order in (stages, stages[::-1]):
        assert ModelPoints.of_stages(order).layers(HookPoint.ATTN_OUT) == (0, 2)


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_every_row_speaks_of_every_point_of_a_block(row: Family) -> None:
    assert set(row.layout) | set(FOUND) == {point for point in HookPoint if point.has_layer}


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_every_row_names_classes_that_define_a_forward(row: Family) -> None:
    for name in (row.stack, row.block):
        module, _, class_name = name.partition(".")
        if not _source_file(module).exists():
            pytest.skip(f"this version of vLLM has no {module}.py")
        definition = next(
            node
            for node in ast.parse(_source_file(module).read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == class_name
        )
        assert any(
            isinstance(node, ast.FunctionDef) and node.name == "forward" for node in definition.body
        )


def _source_file(module: str) -> Path:
    """The file of a model in vLLM, or in transformers for the `modeling_` ones."""
    package = "transformers" if module.startswith("modeling_") else "vllm"
    root = Path(importlib.util.find_spec(package).origin).parent
    if package == "vllm":
        return root / "model_executor" / "models" / f"{module}.py"
    return root / "models" / module.removeprefix("modeling_") / f"{module}.py"


class Mixture(nn.Module):
    """A mixture of experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts)
        self.gate.output_size = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x).amax(-1, keepdim=True)


def test_queries_keys_and_values_are_known_where_one_kernel_reads_them() -> None:
    stack = Stack()
    kernels = [Kernel() for _ in stack.layers]
    for layer, kernel in zip(stack.layers, kernels, strict=True):
        layer.self_attn.attn = kernel
    sites = resolve(CausalLM(stack))
    found = sites.sites[HookPoint.K, 1]
    assert found.module is kernels[1] and found.width == 4
    assert found.stream == Argument("key", 1)
    order = [point for point, layer in sites.sites if layer == 1]
    assert order[order.index(HookPoint.ATTN_IN) :][1:5] == list(HEAD_POINTS)
    assert sites.points.heads[HookPoint.Q, 1] == HeadSplit(2, 4)
    assert sites.points.heads[HookPoint.V, 1] == HeadSplit(1, 4)
    kernels[0].num_heads = 3
    kernels[1].kv_sharing_target_layer_name = "layers.0.self_attn.attn"
    stack.layers[2].self_attn.attn = nn.Identity()
    points = resolve(CausalLM(stack)).points
    assert [points.layers(point) for point in HEAD_POINTS[:3]] == [(1,), (0,), (0,)]
    for place, why in {
        (HookPoint.Q, 0): "3 heads of 4 are 12 numbers, .* wider than the residual stream, 8",
        (HookPoint.K, 1): "the keys and values of another layer",
        (HookPoint.V, 2): "SelfAttention holds 0 of vLLM's attention kernels",
    }.items():
        with pytest.raises(ValueError, match=why):
            points.check(*place)
    parallel = resolve(CausalLM(stack), tensor_parallel_size=2).points.missing
    assert "every rank holds a part" in parallel[HookPoint.V, 1]


def test_routers_are_found_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack()
    stack.layers[1].mlp = Mixture(3)
    stack.layers[2].mlp = Mixture(HIDDEN + 1)
    row = Family("routed", f"{__name__}:Stack", f"{__name__}:Block", FULL)
    assert resolve(CausalLM(stack), families=[row]).points.layers(HookPoint.ROUTER) == ()
    monkeypatch.setattr("tllm.models.routers.ROUTERS", {f"{__name__}:Mixture": "gate"})
    sites = resolve(CausalLM(stack), families=[row])
    assert sites.points.layers(HookPoint.ROUTER) == (1,)
    assert sites.points.experts == {1: 3} == sites.points.described()["experts"]
    site = sites.sites[HookPoint.ROUTER, 1]
    assert site.module is stack.layers[1].mlp.gate and site.width == 3
    with pytest.raises(ValueError, match="in layer 0: it has no mixture of experts"):
        sites.points.check(HookPoint.ROUTER, 0)
    with pytest.raises(ValueError, match=f"in layer 2: it has {HIDDEN + 1} experts, and what is"):
        sites.points.check(HookPoint.ROUTER, 2)
    stack.layers[1].mlp.is_sequence_parallel = True
    missing = resolve(CausalLM(stack), families=[row]).points.missing
    assert "rows that it routes are divided over" in missing[HookPoint.ROUTER, 1]
    stack.layers[1].mlp = Mixture(3)
    del stack.layers[1].mlp.gate.output_size
    missing = resolve(CausalLM(stack), families=[row]).points.missing
    assert "chosen inside its router (" in missing[HookPoint.ROUTER, 1]
