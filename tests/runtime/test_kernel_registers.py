"""What the kernel of tap and norm takes of a multiprocessor, as the compiler for an H200 says.

A kernel of three microseconds, 56 times a step: registers pushed out into memory cost half a
microsecond each time, also where nobody asks for anything, and no result shows it.
"""

import re
import subprocess

import pytest

from tllm.runtime.kernels import tap_norm
from tllm.runtime.kernels.backend import HAS_TRITON, INTERPRETED

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or INTERPRETED,
    reason="no kernel is compiled: Triton interprets it, or is not there",
)

GROUP = 128
SPILLED = 16
"""Bytes of a thread that may lie in memory; another compiler puts a few there."""


def stack_of(hidden, form, tmp_path):
    """The bytes of a thread's stack, of the kernel for few rows of a width."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    block = triton.next_power_of_2(hidden)
    rows = ("stream_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "sum_ptr")
    constants = {"HIDDEN": hidden, "BLOCK": block, "FORM": form, "PLUS_ONE": False}
    constants |= {"GROUP": GROUP if form == tap_norm._GROUPS else 0}
    constants |= {"CHECK": False, "AHEAD": True, "EARLY": True}
    fp8 = form != tap_norm._PLAIN
    told = {
        **dict.fromkeys(rows, "*bf16"),
        **({"normed_ptr": "*fp8e4nv"} if fp8 else {}),
        "scale_ptr": "*fp32",
        "desc_ptr": "*i64",
        "plan_ptr": "*i32",
        "eps": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    kernel = tap_norm._tap_norm_kernel
    signature = {name: told.get(name, "i32") for name in kernel.arg_names}
    unaligned = {"plan_stride", "scale_row_stride", "scale_stride", "eps", *constants}
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(signature)
            if name not in unaligned
        },
    )
    options = {
        "num_warps": tap_norm.warps(block),
        "maxnreg": tap_norm._AHEAD_REGISTERS,
        "launch_pdl": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    told = subprocess.run(
        [cuobjdump, "-res-usage", str(file)], capture_output=True, text=True, check=True
    ).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])


@pytest.mark.parametrize(
    ("hidden", "form"),
    [
        (896, tap_norm._PLAIN),
        (3584, tap_norm._PLAIN),
        (5120, tap_norm._PLAIN),
        (3584, tap_norm._ROW),
        (3584, tap_norm._GROUPS),
    ],
)
def test_the_kernel_of_tap_and_norm_keeps_its_registers(hidden, form, tmp_path):
    assert stack_of(hidden, form, tmp_path) <= SPILLED
