"""The picture shows the sweep: a line for every load and routing, at the places of its numbers."""

import copy
import itertools
from xml.etree import ElementTree

import pytest

from benchmarks import rounding_sweep
from benchmarks.rounding_plot import draw

SVG = "{http://www.w3.org/2000/svg}"
RECORD = {
    "gpu": None,
    "date": "2026-01-01",
    "tile_m": 128,
    "shape": {"D": 8, "N": 4, "E": 8, "K": 2},
    "points": [
        {
            "tokens": tokens,
            "tokens_per_expert": tokens / 4,
            "load": load,
            "top_k": {"unused_fraction": 16 / tokens},
            "nearest": {"unused_fraction": 0.0},
        }
        for load in ("uniform", "zipf")
        for tokens in (32, 64, 128)
    ],
}


def lines_of(svg):
    found = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return [[tuple(map(float, place.split(","))) for place in line.get("points").split()] for line in found]


def test_lines_stand_where_the_numbers_are():
    lines = lines_of(draw(RECORD))
    assert len(lines) == 4
    top_k, rounded = lines[:2]
    assert len({y for _, y in rounded}) == 1
    floor = rounded[0][1]
    heights = [floor - y for _, y in top_k]
    assert heights == pytest.approx([heights[0], heights[0] / 2, heights[0] / 4], abs=0.2)  # one decimal is written
    assert heights[2] > 10
    steps = [after[0] - before[0] for before, after in itertools.pairwise(top_k)]
    assert steps == pytest.approx([steps[0]] * 2, abs=0.2)
    assert steps[0] > 10


def test_times_get_a_panel_of_their_own_where_all_are_there():
    record = copy.deepcopy(RECORD)
    for point in record["points"]:
        point["top_k"]["both_ms"], point["nearest"]["both_ms"] = 2.0, 1.0
    lines = lines_of(draw(record))
    assert len(lines) == 8
    assert min(x for line in lines[4:] for x, _ in line) > max(x for line in lines[:4] for x, _ in line)
    del record["points"][0]["nearest"]["both_ms"]
    assert len(lines_of(draw(record))) == 4


def test_a_sweep_without_a_gpu_counts_and_does_not_time(monkeypatch):
    monkeypatch.setattr(rounding_sweep, "TOKENS", (256, 512))
    monkeypatch.setattr(rounding_sweep, "BASE", rounding_sweep.BASE._replace(D=16, E=16, K=2))
    record = {**copy.deepcopy(RECORD), "points": []}
    rounding_sweep.sweep(record, "cpu", None)
    assert [point["tokens_per_expert"] for point in record["points"]] == [32, 64] * 2
    assert all(point["nearest"]["unused_fraction"] == 0 for point in record["points"])
    assert all(point["top_k"]["unused_fraction"] > 0.1 for point in record["points"])
    assert len(lines_of(draw(record))) == 4
