"""The kernels at taps as the compiler makes them for a GPU, which none is needed for."""

from __future__ import annotations

import re

import pytest

from tllm.runtime.columns import Column
from tllm.runtime.kernels import row_plan, tap, tap_norm
from tllm.runtime.kernels.backend import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("Triton's kernels are interpreted in this pass", allow_module_level=True)

KERNELS = {
    "tap": tap._tap_kernel,
    "tap_norm": tap_norm._tap_norm_kernel,
    "tap_norm_fp8": tap_norm._tap_norm_kernel,
    "tap_norm_fp8_groups": tap_norm._tap_norm_kernel,
}
UNALIGNED = "eps", "plan_stride", "scale_row_stride", "scale_stride"
LOOKS_AHEAD = {
    "many rows": {"AHEAD": False, "EARLY": False},
    "few rows": {"AHEAD": True, "EARLY": False},
    "few rows, early": {"AHEAD": True, "EARLY": True},
}


def compiled(name, dtype, hidden, choice):
    """PTX for compute capability 9.0; rows of the stream are aligned, as a model's are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, fp8, groups = KERNELS[name], "fp8" in name, name.endswith("groups")
    pointers = {"desc_ptr": "*i64", "plan_ptr": "*i32", "scale_ptr": "*fp32"}
    if fp8:
        pointers["normed_ptr"] = "*fp8e4nv"
    numbers = {
        "eps": "fp32",
        "plan_stride": "i32",
        "stream_stride": "i32",
        "residual_stride": "i32",
        "scale_row_stride": "i32",
        "scale_stride": "i32",
    }
    chosen = {"HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden), **LOOKS_AHEAD[choice]}
    if "HAS_RESIDUAL" in kernel.arg_names:
        chosen["HAS_RESIDUAL"] = True
    if "FORM" in kernel.arg_names:
        chosen["FORM"] = tap_norm._ROW if fp8 else tap_norm._PLAIN
        chosen["GROUP"] = 128 if groups else 0
        if groups:
            chosen["FORM"] = tap_norm._GROUPS
        chosen["PLUS_ONE"] = fp8
    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in chosen:
            signature[name] = "constexpr"
        else:
            rows = f"*{dtype}" if name.endswith("_ptr") else "i32"
            signature[name] = pointers.get(name) or numbers.get(name) or rows
            if name not in UNALIGNED and (hidden % 16 == 0 or name.endswith("_ptr")):
                aligned[(number,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in chosen.items()}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8, "launch_pdl": chosen["EARLY"]}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *((name, choice) for name in ("tap", "tap_norm") for choice in LOOKS_AHEAD),
        ("tap_norm_fp8", "few rows, early"),
        ("tap_norm_fp8_groups", "few rows, early"),
        ("tap_norm_fp8_groups", "many rows"),
    ],
)
def test_rows_of_every_table_move_sixteen_bytes_at_a_time(name, choice):
    """The ring, what is added, sums and vectors of steering: all are found by their address."""
    ptx = compiled(name, "bf16", 3584, choice)
    moved = re.findall(r"(?:ld|st)\.global\S*?(\.v\d)?\.b(\d+)", ptx)
    assert moved
    # A classifier's units are fewer than threads, and are read in four places.
    assert len([bits for _, bits in moved if bits == "16"]) == 4, "one element at a time"
    assert (".v4", "32") in moved


def test_rows_that_do_not_fill_sixteen_bytes_are_not_taken_for_aligned():
    ptx = compiled("tap", "bf16", 3590, "few rows")  # nor do those of float32
    wide = re.findall(r"(?:ld|st)\.global\S*?\.v\d\.b\d+", ptx)
    assert not wide


def test_a_plan_row_that_no_column_uses_is_not_written():
    """Each store stands behind a branch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = row_plan._row_plan_kernel.kernel
    chosen = {"BLOCK": 256}
    numbers = dict.fromkeys(("plan_stride", "used"), "i32")
    signature = {
        name: "constexpr" if name in chosen else numbers.get(name, "*i32")
        for name in kernel.arg_names
    }
    constants = {(kernel.arg_names.index(name),): value for name, value in chosen.items()}
    source = ASTSource(kernel, signature, constexprs=constants, attrs={})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    branches = re.findall(r"@%p\d+ bra|bra\S*\s+\$", ptx)
    stores = re.findall(r"st\.global", ptx)
    assert stores and len(branches) > len(Column)
    loads = len(re.findall(r"ld\.global", ptx))
    assert loads == 5 + len(Column)
