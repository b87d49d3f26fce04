"""What vLLM's text-generation architectures are to tLLM: tapped and right, or refused, and why.

    PYTHONPATH=. python -m tests.oracle.survey --cache DIR [--families [NAME ...]] [--write]

Each family is a tiny random model. It is served apart from this process, in a mixed batch, and
compared with `transformers` in float32: rows at every hook point of every layer that has it,
tokens, and steering at one place of each point. What was found is kept in `--cache`, a JSON file a
family; `--write` adds what is there to `findings.jsonl`, and makes `doc/reference/models.md` of all
of it (`--families` without a name surveys nothing more). `python -m tests.oracle.gpu --cache DIR`
puts what a GPU found there, too. Multimodal models, and Qwen 3.5, need torchvision.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from tllm.spec.hooks import HookPoint, ModelPoints, ranges
from tllm.verify.tolerance import Tolerance

from .families import (
    CHECKPOINT_OF,
    CONFIGS,
    LACKING,
    SURVEYED,
    Variant,
    limits,
    served_dtype,
    tolerance,
)

if TYPE_CHECKING:
    from .reference_process import ReferenceProcess

DOCUMENT = Path(__file__).parents[2] / "doc" / "reference" / "models.md"
FINDINGS = Path(__file__).with_name("findings.jsonl")
TIMEOUT_S = 400
ALL = CONFIGS | SURVEYED


@dataclass
class Finding:
    """What was found of one family on one runner.

    runner: where vLLM ran: "V1 CPU", "V2 CPU" or "GPU".
    found_as: the family as tLLM names it.
    layers: by hook point, the layers that have it; an empty list for one without layers.
    num_layers: of the tiny model.
    worst: by hook point and for `logits`, the largest error relative to the largest value.
    refusal: why it has no hook points.
    problems: what was wrong, in words.
    failure: why the model could not be run at all.
    dtype: in which vLLM computed.
    plain: how far untouched vLLM's log-probabilities are from transformers', where something was
        wrong or refused.
    """

    family: str
    runner: str
    architecture: str = ""
    found_as: str = ""
    num_layers: int = 0
    layers: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    tokens: int = 0
    refusal: str = ""
    problems: list[str] = field(default_factory=list)
    failure: str = ""
    dtype: str = "float32"
    plain: float | None = None
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return not (self.problems or self.failure or self.refusal)

    def describe(self, points: ModelPoints) -> None:
        """Fill in what the resolver said of the served model."""
        self.found_as = points.family
        self.num_layers = points.num_layers
        self.reasons = points.reasons
        if not points.points:
            self.refusal = points.reasons["post_block"]
        self.layers = {
            point.value: [layer for layer in points.layers(point) if layer is not None]
            for point in points.points
        }

    def add(self, report: Any) -> None:
        """Count in what a comparison of a batch found."""
        self.problems += report.problems[:5]
        self.rows += report.rows
        self.tokens += report.tokens
        for point, error in report.worst.items():
            self.worst[point] = max(error, self.worst.get(point, 0.0))

    def write(self, cache: Path) -> None:
        name = self.runner.split()[0].lower()
        (cache / f"{self.family}-{name}.json").write_text(json.dumps(asdict(self)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--families", nargs="*", default=list(ALL))
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        import tests.conftest  # noqa: F401  chooses the runner

        for finding in _examined_here(given.families, given.runner):
            print(json.dumps(asdict(finding)), flush=True)
        return 0
    given.cache.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for finding in examined(given.families, given.runner):
        finding.write(given.cache)
        wrong += not (finding.is_right or finding.refusal)
        print(_line(finding), flush=True)
    if given.write:
        found = {(one.family, one.runner): one for one in kept()}
        for path in given.cache.glob("*.json"):
            one = Finding(**json.loads(path.read_text()))
            found[one.family, one.runner] = one
        lines = [json.dumps(asdict(found[key])) for key in sorted(found)]
        FINDINGS.write_text("\n".join(lines) + "\n")
        DOCUMENT.write_text(document(kept()))
    return int(wrong > 0)


def kept() -> list[Finding]:
    """What the page was last written of."""
    return [Finding(**json.loads(line)) for line in FINDINGS.read_text().splitlines()]


_RUNNERS = {"v1": "V1 CPU", "v2": "V2 CPU"}


def examined(families: Sequence[str], runner: str) -> Iterator[Finding]:
    """What was found of each family, in a process that is replaced when it dies or hangs."""
    left = list(families)
    while left:
        with tempfile.TemporaryFile("w+") as errors:
            with _child(left, runner, errors) as child:
                assert child.stdout is not None
                for line in _lines_in_time(child):
                    if line.startswith('{"family"'):
                        left.pop(0)
                        yield Finding(**json.loads(line))
            if child.returncode and left:
                errors.seek(0)
                why = _why(errors.read()) or f"exit status {child.returncode}"
                yield Finding(left.pop(0), _RUNNERS[runner], failure=why)


def _child(families: Sequence[str], runner: str, errors: IO[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __spec__.name, "--child", "--families", *families]
    command += ["--runner", runner, "--cache", os.devnull]
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "TLLM_TEST_RUNNER": runner,
        "TRITON_INTERPRET": str(int(runner == "v2")),  # Triton may be imported before it is chosen
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )


def _lines_in_time(child: subprocess.Popen[str]) -> Iterator[str]:
    """What the child prints; it is killed when it says nothing for `TIMEOUT_S`."""
    assert child.stdout is not None
    while True:
        watch = threading.Timer(TIMEOUT_S, child.kill)
        watch.start()
        line = child.stdout.readline()
        watch.cancel()
        if not line:
            return
        yield line


def _why(errors: str) -> str:
    """The error that ended a process, as it printed it; "" where it printed none."""
    raised = re.findall(r"^(?:\[\S+\]: )?([\w.]*(?:Error|Exception)\b.*)$", errors, re.MULTILINE)
    if not raised:
        return ""
    places = re.findall(r'File ".*?([^/]+)", line (\d+)', errors)
    where = f" ({places[-1][0]}, line {places[-1][1]})" if ":" not in raised[0] else ""
    return f"{raised[0]}{where}"[:300]


def _examined_here(families: Sequence[str], runner: str) -> Iterator[Finding]:
    """Serve each family in this process and compare it with transformers."""
    from vllm.model_executor.models import registry

    from .reference_process import ReferenceProcess

    # vLLM looks at a model class in a process of its own, to keep CUDA out of this one: 8 s.
    registry._run_in_subprocess = lambda look: look()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        references: dict[torch.dtype, ReferenceProcess] = {}
        for family in families:
            dtype = served_dtype(family)
            if dtype not in references:
                variant = Variant(dtype=dtype)
                references[dtype] = ReferenceProcess(Path(root) / str(dtype), variant)
                stack.callback(references[dtype].close)
            yield _examine(family, runner, references[dtype])


def _examine(family: str, runner: str, reference: ReferenceProcess) -> Finding:
    began = time.monotonic()
    finding = Finding(family, _RUNNERS[runner])
    finding.dtype = str(served_dtype(family)).removeprefix("torch.")
    checkpoint = reference.checkpoint(family)
    config = json.loads((checkpoint / "config.json").read_text())
    finding.architecture = config["architectures"][0]
    _compare(finding, reference, checkpoint, seeded=runner == "v2")
    if finding.problems or finding.refusal:
        finding.plain = _plain_error(family, reference, checkpoint)
    finding.seconds = round(time.monotonic() - began, 1)
    return finding


def _compare(finding: Finding, reference: Any, checkpoint: Path, *, seeded: bool) -> None:
    from tllm.verify.batches import mixed_batch, steered_batch

    from .differential import CHUNK, prompts_of, serving

    family = finding.family
    with serving(
        family,
        reference,
        checkpoint,
        seeded=seeded,
        roomy=True,
        dtype=finding.dtype,
        enforce_eager=True,
    ) as served:
        points: ModelPoints = served.llm.intervention_stats()[0]["model_points"]
        finding.describe(points)
        if finding.refusal:
            return
        served.places = [place for place in served.places if place[0] != LACKING.get(family)]
        finding.problems = served.refusals()
        found = {(point.value, layer) for point in points.points for layer in points.layers(point)}
        lacking = [place for place in served.places if place not in found]
        if lacking:
            finding.problems.append(f"not found, and transformers has them: {lacking}")
        served.places = [place for place in served.places if place in found]
        accepted = _accepted(family, served.points)
        steered = list({point: (point, layer) for point, layer in served.places}.values())
        for batch in (
            mixed_batch(prompts_of(served.vocab), CHUNK),
            steered_batch(steered, prompts_of(served.vocab), served.vector),
        ):
            with served.consumers():
                report = served.compare(batch, accepted)
            finding.add(report)


def _accepted(family: str, points: Sequence[str]) -> Tolerance:
    """The errors that rounding explains, and what the family is known to differ by."""
    if served_dtype(family) != torch.float32:
        # A delta net divides by norms and multiplies gates in it, too: with 48 random runs and
        # steering, `transformers` in bfloat16 is off from itself in float32 by up to 1.1 of the
        # limits of other models (Qwen 2: 0.95), and vLLM may be as far off on the other side.
        dense = Tolerance.of(served_dtype(family))
        doubled = {point: 2 * limit for point, limit in dense.points.items()}
        return Tolerance(doubled, regret=2 * doubled["logits"])
    # Two logits are compared to find the likeliest token, and both may be off.
    return Tolerance(limits(family, [*points, "logits"]), regret=2 * tolerance(family))


def _plain_error(family: str, reference: Any, checkpoint: Path) -> float:
    """The largest difference of log-probabilities between untouched vLLM and transformers."""
    from vllm import LLM, SamplingParams

    from tllm.verify.batches import mixed_batch

    from .differential import CHUNK, ENGINE, SMALL, prompts_of
    from .families import engine_arguments

    given = {key: value for key, value in ENGINE.items() if key not in ("hook_points", *SMALL)}
    llm = LLM(
        str(checkpoint),
        dtype=str(served_dtype(family)).removeprefix("torch."),
        enforce_eager=True,
        **given,
        **engine_arguments(family),
    )
    vocab = llm.llm_engine.model_config.get_vocab_size()
    prompts = [ask.prompt for ask in mixed_batch(prompts_of(vocab), CHUNK)]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1, detokenize=False),
        use_tqdm=False,
    )
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logits = reference.logits(family, [*prompt, *tokens][:-1])[len(prompt) - 1 :]
        expected = torch.log_softmax(logits, -1)
        for step, (token, found) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
            worst = max(worst, abs(found[token].logprob - float(expected[step, token])))
    return worst


def _line(finding: Finding) -> str:
    if finding.failure:
        said = f"not run: {finding.failure}"
    elif finding.refusal:
        said = f"refused: {finding.refusal}"
    elif finding.problems:
        said = f"WRONG: {finding.problems[0]} (plain vLLM off by {finding.plain})"
    else:
        said = f"right to {max(finding.worst.values()):.1e}, {finding.rows} rows"
    return f"{finding.family:22} {finding.runner}  {said}  [{finding.seconds} s]"


# -- the document -------------------------------------------------------------------------------

_HEAD = """# Models

What the architectures that vLLM {version} serves are to tLLM. `tllm doctor --model MODEL` says it
of a model of yours, and `llm.steering.layers()` of the engine that runs.

A hook point that a model, or a layer, lacks is refused when it is asked for, with the reason and
the layers that have it. What is not understood has no hook points; nothing is guessed. A mixer
that stands where attention stands (state-space, linear attention, short convolution) has its input
at `attn_in` and its branch at `attn_out`. Where an architecture has one mixer a layer, a layer has
the points of attention or those of the MLP. Gemma 3n carries several streams, and its blocks
compute with one of them, the active one: `embed`, `pre_attn` and `post_block` are that stream as it
enters and leaves a block. The others begin as projections of the same embedding, and the final norm
reads all of them, so that `lens`, the `freeze` of sweeps and ESamp guided by `post_block` are
refused.

This page is written by `python -m tests.oracle.survey`: tiny random models of three layers, served
in one mixed batch, against `transformers` with forward hooks, one request at a time. Compared are
the rows of every hook point of every layer, tokens, and steering at one place of each point. The
error is the largest of any row, relative to the largest value of its tensor, in float32 where no
other type is named. Numbers of layers are those of the tiny model.

On the GPU, an H200 or H100, engines were compiled, with CUDA graphs and the V2 runner, of models
twice as wide, and answered the six batches of `python -m tests.oracle.gpu`: mixed, the same again,
written by consumers, steered, patched, and steered under conditions. A gated delta net (Qwen3-Next,
Qwen 3.5) rounds its state with every token; its rows may be off by three times what others may.

*given NAME*: `transformers` has no class of it. Its tiny model is one of NAME, which computes the
same in this configuration, and vLLM serves it with the class of the architecture that is named.
Gemma 3n was compared without its embeddings by layer, which vLLM adds in its multimodal class
alone.
An empty cell was not run. *not run* on V2: the harness interprets Triton on a CPU, and vLLM
compiles a part of these models with it (or, of Qwen 2 MoE and Qwen 3.5, its process ends).

Quantized: a Qwen 2 in five formats, W8A8, W4A16 and FP8 of `compressed-tensors`, GPTQ and AWQ, was
served on a CPU on the V1 runner, and on an H200, there with the format `fp8`, too (one scale for a
weight, one for each of its blocks, and quantized when it is loaded). Its tokens, and the rows that
leave every block, are those of the same quantized model in plain vLLM
(`tests/engine/test_quantized.py`). On a GPU its norms are computed with their taps. vLLM 0.32 has
no bitsandbytes any more.
"""


def document(findings: Sequence[Finding]) -> str:
    """`doc/reference/models.md`."""
    by_family: dict[str, dict[str, Finding]] = {}
    in_every_run = [finding for finding in findings if finding.family in CONFIGS]
    findings = [finding for finding in findings if finding.family not in CONFIGS]
    for finding in findings:
        by_family.setdefault(finding.family, {})[finding.runner] = finding
    right, refused, differing, failed = [], [], [], []
    seen = {finding.architecture for finding in findings}
    architectures = set()
    for family, on in sorted(by_family.items()):
        ran = [finding for finding in on.values() if not finding.failure]
        first = next(iter(ran or on.values()))
        seen.add(_architecture(family) if family in ALL else family)
        name = _name(family, first.architecture)
        if not ran:
            failed.append(f"| {name} | {first.failure} |")
        elif first.refusal:
            refused.append(f"| {name} | {first.refusal} |")
        elif any(finding.is_right for finding in ran):
            cells = " | ".join(
                _error_cell(on.get(runner)) for runner in (*_RUNNERS.values(), "GPU")
            )
            right.append(f"| {name} | {first.found_as} | {_points_cell(first)} | {cells} |")
            architectures.add(first.architecture)
        else:
            worst = max(first.worst.values(), default=0.0)
            differing.append(f"| {name} | {worst:.0e} | {first.plain or 0.0:.0e} |")
    tested = sorted({_architecture(family) for family in CONFIGS} - seen)
    seen |= set(tested)
    parts = [
        _HEAD.format(version=_version()),
        f"## Right: {len(architectures) + len(tested)} architectures",
        "",
        "| Architecture | Family | Hook points | V1, CPU | V2, CPU | GPU |",
        "|---|---|---|---|---|---|",
        *right,
        "",
        *_compared_at(findings),
        "",
        "As right, and held in every run of the tests (`tests/oracle/test_differential.py`), under "
        "preemption, prefix caching and prompts computed in chunks:",
        "",
        ", ".join(f"`{name}`" for name in tested) + f". {_said_of_gpus(in_every_run)}",
        *_table("Refused", "", ("Architecture", "Reason"), refused),
        *_table(
            "Differing",
            "These are not proved. Untouched vLLM differs from `transformers`, too: the last "
            "column is how far its log-probabilities are off.",
            ("Architecture", "Largest error of a row", "Untouched vLLM"),
            differing,
        ),
        *_table(
            "Not run on a CPU",
            "vLLM itself does not start them here, or stops. `python -m tests.oracle.gpu "
            "--families NAME` compares them on a GPU.",
            ("Architecture", "What vLLM said"),
            failed,
        ),
        *_not_compared(seen),
        "",
    ]
    return "\n".join(parts)


def _compared_at(findings: Sequence[Finding]) -> list[str]:
    """In which rows points were compared that the first ones were written before."""
    right = [one for one in findings if one.is_right]
    older = {one.family for one in right if one.runner == "V1 CPU" and "embed" not in one.worst}
    but = f", but for these, which are older: {', '.join(sorted(older))}" if older else ""
    routed, keyed = (
        ", ".join(sorted({one.family for one in right if point in one.worst})) or "none"
        for point in ("router", "k")
    )
    return [
        f"`embed`, and `attn_heads` where there is one, were compared in every row{but}. `router` "
        "is a point of mixtures of experts; it was compared, and steered, in these rows: "
        f'{routed}. `q`, `k` and `v` are newer than other rows, whose "all" is without them; they '
        f"were compared in these: {keyed}.",
    ]


def _not_compared(seen: set[str]) -> list[str]:
    """What vLLM serves, or served, beside what was `seen`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import registry

    served = registry._TEXT_GENERATION_MODELS | registry._TRANSFORMERS_SUPPORTED_MODELS
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    rows = [
        f"| `{name}` | {_said_by_the_table(name, served)} | "
        f"{'no tiny model of it was made' if name in known else 'no reference here'} |"
        for name in served
        if name not in seen and name.endswith(("LM", "Model"))
    ]
    multimodal = [f"`{name}`" for name in registry._MULTIMODAL_MODELS if name not in seen]
    gone = [
        f"`{name}` (until {version})"
        for name, version in registry._PREVIOUSLY_SUPPORTED_MODELS.items()
        if name not in seen and name.endswith("LM")
    ]
    return [
        *_table(
            "Not compared",
            "Rows of the table were written from vLLM's source. A model without one is tapped "
            "where its blocks verifiably compute as Llama's do, which is looked at when it is "
            "loaded, and refused otherwise. *No reference here*: `transformers` knows the model "
            "only as code that comes with its weights, or not at all.",
            ("Architecture", "What tLLM makes of it", "Why it was not compared"),
            rows,
        ),
        "",
        "Of multimodal models the language model inside is tapped: by the row of its family, where "
        "there is one, or where it verifiably computes as Llama does; others are refused. Not "
        f"compared were {', '.join(multimodal)}.",
        "",
        "## No longer served by vLLM",
        "",
        ", ".join(gone) + ".",
    ]


def _said_by_the_table(name: str, served: Mapping[str, tuple[str, str]]) -> str:
    """What the table of families says of an architecture.

    Args:
        served: of each architecture, the module of vLLM that implements it, and its class there.
    """
    from tllm.models.families import FAMILIES

    module, class_name = served[name]
    others = {other for _, other in served.values()} - {class_name}
    inherited = {each: _forward_of(module, each) for each in _classes(module).keys() - others}
    known = {module.rpartition(".")[2], inherited.pop(class_name, "").split(".")[0]}
    for row in FAMILIES:
        files = {row.stack.split(".")[0], row.block.split(".")[0], row.name}
        if known & files or row.stack in inherited.values():
            reason = row.layout[HookPoint.POST_BLOCK]
            return f"refused: {reason}" if isinstance(reason, str) else "tapped, by its row"
    return "looked at when it is loaded"


def _forward_of(module: str, name: str) -> str:
    """`file.Class` of the class in vLLM's models whose `forward` a class runs; "" for none."""
    classes = _classes(module)
    if name not in classes:
        return ""
    definition, imported = classes[name]
    if any(
        isinstance(node, ast.FunctionDef) and node.name == "forward" for node in definition.body
    ):
        return f"{module}.{name}"
    bases = [ast.unparse(base) for base in definition.bases]
    return next(filter(None, (_forward_of(imported.get(base, module), base) for base in bases)), "")


@cache
def _classes(module: str) -> dict[str, tuple[ast.ClassDef, dict[str, str]]]:
    """By name, those that a file of vLLM's models defines, and from which file it imports what.

    It is read, and not imported, which some of them cannot be without a GPU or torchvision."""
    import vllm

    path = Path(vllm.__file__).parent / "model_executor" / "models" / f"{module}.py"
    if not path.exists():
        return {}
    body = ast.parse(path.read_text()).body
    imported = {
        alias.name: node.module.rpartition(".")[2]
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return {node.name: (node, imported) for node in body if isinstance(node, ast.ClassDef)}


def _table(title: str, text: str, columns: Sequence[str], rows: Sequence[str]) -> list[str]:
    """A section with a table; nothing where there are no rows."""
    if not rows:
        return []
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return ["", f"## {title}", "", *([text, ""] if text else []), *head, *rows]


def _architecture(family: str) -> str:
    """The architecture that vLLM is given for a family of the oracle."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    model_type, values = ALL[family]
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if "text_config" in values:
        classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return str(values["architectures"][0] if "architectures" in values else classes[model_type])


def _name(family: str, architecture: str) -> str:
    given = f", given {CHECKPOINT_OF[family]}" if family in CHECKPOINT_OF else ""
    architecture = architecture or (_architecture(family) if family in ALL else "")
    return f"`{architecture}` ({family}{given})" if architecture else family


def _version() -> str:
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def _said_of_gpus(findings: Sequence[Finding]) -> str:
    """Which families that every run of the tests compares were right on a GPU."""
    right = {one.family for one in findings if one.runner == "GPU" and one.is_right}
    lacking = sorted(CONFIGS.keys() - right)
    but = f", but for {', '.join(lacking)}" if lacking else ""
    return f"On a GPU they were right, too{but}."


def _error_cell(finding: Finding | None) -> str:
    if finding is None:
        return ""
    if finding.failure:
        return "not run"
    if not finding.is_right:
        return "differs"
    computed_in = "" if finding.dtype == "float32" else f" ({finding.dtype})"
    return f"{max(finding.worst.values()):.0e}{computed_in}"


def _points_cell(finding: Finding) -> str:
    known = [p.value for p in HookPoint if p.value in finding.reasons and p is not HookPoint.ROUTER]
    lacking = [point for point in known if point not in finding.layers]
    every = "all" if not lacking else f"all but {', '.join(lacking)}"
    partly: dict[str, list[str]] = {}
    for point, layers in finding.layers.items():
        if layers and len(layers) < finding.num_layers:
            partly.setdefault(ranges(layers), []).append(point)
    some = [f"{', '.join(points)} in layers {where}" for where, points in partly.items()]
    if finding.layers.get("router") and len(finding.layers["router"]) == finding.num_layers:
        every += ", and router"
    return "; ".join([every, *some])


if __name__ == "__main__":
    sys.exit(main())
