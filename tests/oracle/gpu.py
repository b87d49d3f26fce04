"""The oracle on a CUDA machine: vLLM's V2 runner, compiled, with CUDA graphs, in bfloat16.

    PYTHONPATH=. python -m tests.oracle.gpu --dtype bfloat16
    PYTHONPATH=. python -m tests.oracle.gpu --dtype float32 --families llama4
    PYTHONPATH=. python -m tests.oracle.gpu --families new --cache DIR  # for the survey's page

In float32 the kernels multiply with all bits: a mixture of experts is best checked so, where no
rounding decides which expert a row goes to. The reference stays `transformers` in float32 on the
CPU. Both sides have the same weights, because every weight is rounded to the served dtype before it
is saved. Without CUDA the same runs on the V1 runner: that is how the tolerances were first
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from tllm.verify.tolerance import FLOAT32, LAYERS, UNITS, Tolerance

if TYPE_CHECKING:
    from .survey import Finding

HAS_CUDA = torch.cuda.is_available()
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": str(int(HAS_CUDA)),
}
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else Triton multiplies float32 with TF32
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

# Not OLMo 3 and Cohere 2: all three layers of theirs are sliding, as plain vLLM gets wrong here
# (see Gemma 3 in families.py).
FAMILIES = (
    *("qwen2", "llama", "olmo2", "phi3", "gpt2", "gemma3", "gemma2", "mistral", "qwen3"),
    *("opt", "starcoder2", "stablelm", "falcon", "glm4", "cohere", "mixtral", "qwen3_moe"),
)

NEW = (
    *("deepseek_v3", "gpt_oss", "qwen3_next", "glm4_moe", "gemma4", "llama4", "qwen2_moe"),
    *("nemotron_h", "nemotron_h_moe", "granitemoehybrid", "jamba", "falcon_h1", "lfm2"),
    # These run on a GPU only.
    *("mamba", "falcon_mamba", "minimax_m2", "laguna"),
)
"""`--families new`: the most used ones that only the survey knows, and what no CPU runs."""

# FlashAttention takes heads of 64, and not of 32 everywhere.
WIDTH = 2


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    family: str
    batch: str
    report: Any = None
    note: str = ""
    failed: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--families", nargs="+", default=FAMILIES, help="names, or `new`")
    parser.add_argument("--cache", type=Path, help="keep what was found for the survey's page")
    parser.add_argument("--cudagraph-mode", help="vLLM's own choice by default")
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture graphs")
    parser.add_argument("--engine", type=json.loads, default={}, help="more of vLLM's arguments")
    given = parser.parse_args(arguments)
    dtype = getattr(torch, given.dtype)
    families = NEW if given.families == ["new"] else given.families
    if given.cache:
        given.cache.mkdir(parents=True, exist_ok=True)

    from .families import Variant
    from .reference_process import ReferenceProcess
    from .survey import Finding

    engine: dict[str, Any] = {"dtype": given.dtype, "enforce_eager": given.eager, **given.engine}
    if HAS_CUDA:
        # Said, not profiled: then several of these can share the card.
        engine |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28}
    if given.cudagraph_mode:
        engine["compilation_config"] = {"cudagraph_mode": given.cudagraph_mode}
    table = Table(dtype)
    with tempfile.TemporaryDirectory() as root:
        reference = ReferenceProcess(Path(root), Variant(WIDTH, dtype))
        for family in families:
            finding = Finding(family, "GPU", dtype=given.dtype)
            try:
                for line in serve(finding, dtype, reference, engine):
                    table.add(line)
            except Exception as error:  # the other families are still of interest
                traceback.print_exc()
                first_line = str(error).partition("\n")[0]
                note = f"{type(error).__name__}: {first_line}"
                table.add(Line(family, "", note=note, failed=True))
                finding.failure = note
            if given.cache and (finding.worst or finding.failure):
                finding.write(given.cache)
        reference.close()
    table.close()
    return int(table.failed)


def serve(
    finding: Finding, dtype: torch.dtype, reference: Any, engine: dict[str, Any]
) -> Iterator[Line]:
    """Serve the family of `finding`, which is filled in; yields a line for each batch."""
    from tllm.verify.batches import mixed_batch, patched_batch, steered_batch
    from tllm.verify.steered import PHASES

    from .differential import CHUNK, prompts_of, serving, written_batch
    from .families import LACKING, SURVEYED, served_dtype, tolerance

    family = finding.family
    if _has_experts(family) and (why := _why_no_experts()):
        yield Line(family, "", note=f"skipped: {why}")
        return
    own = tolerance(family)
    # A gated delta net rounds its state with every token, as if it had more layers. In float16 the
    # errors are a seventh of those in bfloat16, and in both up to 2.6 times what others make.
    layers = LAYERS * 9 if served_dtype(family) == torch.bfloat16 else LAYERS
    given = own if dtype == torch.float32 and own > FLOAT32 else None
    accepted = Tolerance.of(dtype, layers, given=given)
    checkpoint = reference.checkpoint(family)
    config = json.loads((checkpoint / "config.json").read_text())
    finding.architecture = config["architectures"][0]
    roomy = family in SURVEYED
    with serving(family, reference, checkpoint, seeded=HAS_CUDA, roomy=roomy, **engine) as served:
        finding.describe(served.llm.intervention_stats()[0]["model_points"])
        served.places = [place for place in served.places if place[0] != LACKING.get(family)]
        for batch in ("mixed", "mixed, again"):
            with served.consumers():
                report = served.compare(mixed_batch(prompts_of(served.vocab), CHUNK), accepted)
            report.check(roomy or report.preemptions > 0, "nothing was preempted")
            if batch == "mixed, again" and not roomy:
                report.check(report.cached_tokens > 0, "the prefix cache served nothing")
            yield _line(finding, batch, report)
        writes = [(place, phase) for place in served.places for phase in PHASES]
        with served.consumers(writer=True):
            report = served.compare(written_batch(writes, served.vocab), accepted)
        for problem in served.refusals():
            report.check(False, problem)
        yield _line(finding, "written", report)
        with served.consumers():
            report = served.compare(
                steered_batch(served.places, prompts_of(served.vocab), served.vector), accepted
            )
            yield _line(finding, "steered", report)
            report = served.compare(
                patched_batch(served.places, prompts_of(served.vocab), served.vector), accepted
            )
            yield _line(finding, "patched", report)
            report = served.compare(served.gated_asks(served.places), accepted)
        yield _line(finding, "gated", report)


def _line(finding: Finding, batch: str, report: Any) -> Line:
    finding.add(report)
    for problem in report.problems[:10]:
        print(f"{finding.family}, {batch}: {problem}", file=sys.stderr)
    return Line(finding.family, batch, report, failed=bool(report.problems))


def _has_experts(family: str) -> bool:
    from .families import CONFIGS, SURVEYED

    return any("expert" in key or "moe" in key for key in (CONFIGS | SURVEYED)[family][1])


def _why_no_experts() -> str:
    """Why this machine's vLLM cannot run a mixture of experts, or nothing."""
    import vllm._custom_ops  # noqa: F401  registers the kernels there are

    if HAS_CUDA and not hasattr(torch.ops._moe_C, "topk_softmax"):
        return "this build of vLLM has no MoE kernels (make_bundle.py --moe)"
    return ""


class Table:
    """Printed row by row, so that a run that is cut off loses no more than what it was doing."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.failed = False
        self._mixed_up: dict[str, list[float]] = defaultdict(list)
        counts = ("rows", "tokens", "other", "preempt", "cached", "")
        self._print("family", "batch", *UNITS, *counts)
        self._print("", "limit", *(f"{Tolerance.of(dtype).points[point]:.1e}" for point in UNITS))

    def add(self, line: Line) -> None:
        self.failed |= line.failed
        report = line.report
        if report is None:
            print(f"{line.family:16}  {line.note}", flush=True)
            return
        for point, errors in report.mixed_up.items():
            self._mixed_up[point] += errors
        self._print(
            line.family,
            line.batch,
            *(f"{report.worst[p]:.1e}" if p in report.worst else "-" for p in UNITS),
            *map(str, (report.rows, report.tokens, report.differing)),
            *map(str, (report.preemptions, report.cached_tokens)),
            f"FAILED ({len(report.problems)})" if line.failed else "ok",
        )

    def close(self) -> None:
        errors = (self._mixed_up.get(point) for point in UNITS)
        self._print("", "mixed up", *(f"{median(e):.3f}" if e else "-" for e in errors))
        print(
            f"\n{self.dtype} against transformers in float32: largest error of any row, relative "
            "to the largest value of its request's tensor.\nmixed up: the median of these errors "
            "if rows of neighbouring tokens were exchanged. other: greedy tokens that are not the "
            "likeliest of the reference, within the error of its logits.",
            flush=True,
        )

    def _print(self, family: str, batch: str, *cells: str) -> None:
        print(f"{family:16}  {batch:12}", *(f"{cell:>10}" for cell in cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
