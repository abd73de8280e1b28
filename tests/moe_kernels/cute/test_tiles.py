"""Tiles: what may be chosen can run, and the choice depends on the problem's widths and load alone."""

from dataclasses import replace

import pytest

from moe_kernels.cute.tiles import (
    KernelForm,
    TileConfig,
    choose_tile,
    rows_bucket,
    rule_for,
    shared_memory_bytes,
    table_entries,
    why_invalid,
)
from tests.moe_kernels.cute.weight_grad_tiles import SCHEDULES, WEIGHT_GRADS, weight_grad_tile

OLMOE = ("down_backward", "olmoe")
WIDTHS = [(200, 200), (768, 256), (1408, 4096), (2880, 2880), (4096, 1536), (7168, 2048), (8, 8)]


@pytest.mark.parametrize("form", KernelForm)
@pytest.mark.parametrize("widths", WIDTHS)
def test_every_rule_fits_the_chip(form, widths):
    assert why_invalid(form, rule_for(form, *widths), "sm90") is None


@pytest.mark.parametrize("entry", table_entries(), ids=lambda e: f"{e['form']}-{e['shape']}")
def test_every_table_entry_fits_the_chip_and_is_what_is_chosen(entry):
    form, tile = KernelForm(entry["form"]), TileConfig(**entry["tile"])
    assert why_invalid(form, tile, entry["arch"]) is None
    assert choose_tile(form, entry["contraction"], entry["columns"], entry["rows_per_expert"]) == tile


def test_no_two_table_entries_answer_the_same_question():
    keys = [
        (e["arch"], e["form"], e["contraction"], e["columns"], rows_bucket(e["rows_per_expert"]))
        for e in table_entries()
    ]
    assert len(keys) == len(set(keys))


def test_widths_without_a_measurement_get_the_rule():
    assert choose_tile(KernelForm.up, 264, 136, 100) == rule_for(KernelForm.up, 264, 136)


def test_other_rows_per_expert_get_the_tile_measured_nearest():
    measured = {
        e["rows_per_expert"]: TileConfig(**e["tile"]) for e in table_entries() if (e["form"], e["shape"]) == OLMOE
    }
    ((rows, tile),) = measured.items()
    assert tile != rule_for(KernelForm.down_backward, 2048, 1024)
    for other in (1, rows // 2, 8 * rows):
        assert choose_tile(KernelForm.down_backward, 2048, 1024, other) == tile


def test_buckets_double_and_do_not_split_small_changes_of_load():
    assert [rows_bucket(rows) for rows in (0, 1, 2, 3, 1024, 1025, 1536, 2048)] == [0, 0, 1, 2, 10, 11, 11, 11]


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (KernelForm.up, {"stages": 9}, "shared memory"),
        (KernelForm.up, {"consumer_registers": 240}, "registers"),
        (KernelForm.up, {"columns": 120}, "multiple of 2 x 32"),
        (KernelForm.rows_matmul_k_major, {"columns": 256, "stages": 2}, "accumulators"),
        (KernelForm.rows_matmul_k_major, {"stages": 4, "store_sets": 2}, "does not divide"),
        (KernelForm.down_backward, {"cuts_last_column": True}, "cannot cut"),
        (KernelForm.rows_matmul_k_major, {"store_rows": 64}, "store_rows=64"),
        (KernelForm.rows_matmul_k_major, {"store_columns": 24, "columns": 192}, "multiple of 16"),
        (KernelForm.weight_grad_left, {"rows": 192, "stages": 2}, "96 rows"),
        (KernelForm.weight_grad_right, {"columns": 192, "stages": 2}, "gathers 192"),
        (KernelForm.weight_grad_left, {"ping_pong": True, "columns": 192, "store_sets": 1}, "no ping-pong"),
        (KernelForm.weight_grad_left_into, {"store_columns": 64}, "shared memory"),
        (KernelForm.down_backward, {"load_stages": 1}, "at least 2"),
        (KernelForm.down_backward, {"store_sets": 1}, "store_sets"),
    ],
)
def test_a_tile_that_cannot_run_is_refused_in_words(form, change, words):
    assert words in (why_invalid(form, replace(rule_for(form, 1024, 512), **change), "sm90") or "")


def test_shared_memory_is_counted_by_hand_once():
    tile = rule_for(KernelForm.up, 4096, 256)
    operands, stores = 4 * (128 + 256) * 64 * 2, 2 * 3 * 64 * 32 * 2
    assert shared_memory_bytes(KernelForm.up, tile) == 2048 + operands + stores


@pytest.mark.parametrize("form", WEIGHT_GRADS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_schedules_of_weight_gradients_fit_the_chip(form, schedule):
    assert why_invalid(form, weight_grad_tile(form, schedule), "sm90") is None
