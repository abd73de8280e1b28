"""Every kernel compiles for Hopper on a machine with no GPU, to the instructions meant and without local memory.

Nothing is run here: races, hangs and results are for test_gpu_ops.py.
"""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moe_kernels.cute.tiles import KernelForm, rule_for, table_entries
from tests.moe_kernels.cute.weight_grad_tiles import SCHEDULES, WEIGHT_GRADS, weight_grad_tile

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (pip install 'gristmill[cute]')")

# Forms and columns of tiles that may put values aside, with the bytes; the reason stands beside the entry.
ALLOWED_FRAMES = {
    (KernelForm.down_backward, 192): 32,  # eight values that live across a tile: 5 to 17 % faster than 128 columns
}


def table_kernels():
    return [[e["form"], e["contraction"], e["columns"], "bfloat16", e["tile"]] for e in table_entries()]


def ruled(form, contraction, columns, dtype="bfloat16"):
    return [form.value, contraction, columns, dtype, asdict(rule_for(form, contraction, columns))]


def dealt(form, contraction, columns):
    tile = replace(rule_for(form, contraction, columns), claims_units=False)
    return [form.value, contraction, columns, "bfloat16", asdict(tile)]


def scheduled(form, schedule):
    return [form.value, 200, 200, "bfloat16", asdict(weight_grad_tile(form, schedule))]


def different_code():
    """Return one kernel for each (form, tile) in the table, and what the table has not: tails, fp16, other forms."""
    first_of_tile = {(form, json.dumps(tile)): [form, *rest, tile] for form, *rest, tile in reversed(table_kernels())}
    tails = [ruled(form, 200, 200) for form in KernelForm]
    schedules = [
        scheduled(form, "a tile stored at once") for form in (KernelForm.weight_grad_left, KernelForm.weight_grad_right)
    ]
    by_number = [dealt(KernelForm.down_backward, 2048, 1024), dealt(KernelForm.rows_matmul_n_major, 2048, 2048)]
    short_last_tile = ruled(KernelForm.up, 2048, 1024)
    fp16 = ruled(KernelForm.down_backward, 1024, 512, "float16")
    return [*first_of_tile.values(), *tails, *schedules, *by_number, short_last_tile, fp16]


def compile_all(kernels, tmp_path):
    """Return a report for each kernel, compiled by two processes."""
    halves = [kernels[::2], kernels[1::2]]
    script = str(Path(__file__).with_name("compile_report.py"))
    running = []
    for i, half in enumerate(halves):
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps(half), encoding="utf-8")
        running.append(
            subprocess.Popen(
                [sys.executable, script, str(path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
        )
    reports = []
    for half, process in zip(halves, running, strict=True):
        out, errors = process.communicate()
        assert process.returncode == 0, errors[-4000:]
        reports += zip(half, map(json.loads, out.splitlines()), strict=True)
    return reports


def environment():
    import os

    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def check(kernel, report):
    form = KernelForm(kernel[0])
    assert report["target"] == "sm_90a"
    assert report["wgmma"] > 0
    assert report["bulk_loads"] > 0
    assert report["bulk_adds" if form.accumulates else "bulk_stores"] > 0
    assert report["bulk_stores" if form.accumulates else "bulk_adds"] == 0
    assert report["multicasts"] > 0
    assert (report["gathers"] > 0) == form.gathers
    assert (report["claims"] > 0) == kernel[4].get("claims_units", True)
    assert report["keeps_its_sums"]
    assert report["chains_per_product"] <= 0.5, "products wait for each other"
    assert report["loops_over_lanes"] == 0, "TMA takes coordinates that ptxas does not believe to be uniform"
    assert report["frame_bytes"] <= ALLOWED_FRAMES.get((form, kernel[4]["columns"]), 0), "local memory: it spills"


def test_kernels_use_wgmma_and_bulk_copies_and_no_local_memory(tmp_path):
    reports = compile_all(different_code(), tmp_path)
    assert {KernelForm(kernel[0]) for kernel, _ in reports} == set(KernelForm)
    for kernel, report in reports:
        check(kernel, report)


@pytest.mark.slow
def test_every_table_entry_uses_wgmma_and_bulk_copies_and_no_local_memory(tmp_path):
    for kernel, report in compile_all(table_kernels(), tmp_path):
        check(kernel, report)


@pytest.mark.slow
def test_every_schedule_of_weight_gradients_uses_wgmma_and_bulk_copies_and_no_local_memory(tmp_path):
    kernels = [scheduled(form, schedule) for form in WEIGHT_GRADS for schedule in SCHEDULES]
    for kernel, report in compile_all(kernels, tmp_path):
        check(kernel, report)
