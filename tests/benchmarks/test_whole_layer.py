"""What is timed as the whole layer is the layer: its values, its tiles, and the ratios drawn from its times."""

import json

import pytest
import torch

from benchmarks import cold_start, whole_layer
from benchmarks.layer_inputs import make_inputs
from benchmarks.shapes import MoEShape
from moe_kernels import BackendName
from moe_kernels.dispatch import BACKENDS

SHAPE = MoEShape(T=512, D=32, N=16, E=8, K=2)


def test_every_whole_layer_of_ours_agrees_with_fp32():
    errors = whole_layer.check(["portable"], device="cpu")
    assert set(errors) == {"portable top_k", "portable nearest"}
    assert all(error > 0 for by_name in errors.values() for error in by_name.values())


def test_a_wrong_layer_is_refused(monkeypatch):
    wrong = whole_layer.moe_experts

    def scaled(*arguments, backend):
        return wrong(*arguments, backend=backend) * (1.1 if backend.name == "portable" else 1.0)

    monkeypatch.setattr(whole_layer, "moe_experts", scaled)
    with pytest.raises(AssertionError, match="portable top_k is wrong"):
        whole_layer.check(["portable"], device="cpu")


def test_rounding_leaves_no_row_of_a_tile_unused_and_top_k_does():
    inputs = make_inputs(SHAPE, "zipf", seed=1, device="cpu")
    router = whole_layer.make_router(SHAPE, inputs.router_ED)
    found = {
        label: whole_layer.count_tiles(whole_layer.route(router, inputs.x_TD, kind).routing.plan)
        for label, kind in whole_layer.KINDS.items()
    }
    assert found["top_k"]["rows"] == SHAPE.T * SHAPE.K
    assert found["top_k"]["unused_fraction"] > 0.05
    assert found["nearest"]["unused_fraction"] == 0
    assert found["nearest"]["tiles"] * whole_layer.TILE_M == found["nearest"]["rows"] > 0


def test_zipf_loads_are_uneven_and_uniform_ones_are_not():
    loads = {}
    for routing in ("uniform", "zipf"):
        inputs = make_inputs(SHAPE, routing, seed=1, device="cpu")
        routed = whole_layer.route(
            whole_layer.make_router(SHAPE, inputs.router_ED), inputs.x_TD, whole_layer.KINDS["top_k"]
        )
        loads[routing] = routed.sums.top_k_count_BE.sum(0)
    mean = SHAPE.T * SHAPE.K / SHAPE.E
    assert loads["zipf"][0] > 2 * mean > 2 * loads["zipf"][-1]
    assert loads["uniform"].max() < 1.6 * mean


def test_both_ways_give_gradients_of_input_router_and_experts():
    inputs = make_inputs(SHAPE, "uniform", seed=2, device="cpu")
    for name, contender in whole_layer.contenders(SHAPE, inputs, ["portable"]).items():
        grads = contender.both()
        assert all(grad.norm() > 0 for grad in grads), name
        assert len(grads) == 4
    backend = BACKENDS[BackendName.portable]
    whole = whole_layer.ours(SHAPE, inputs, whole_layer.KINDS["top_k"], backend)
    alone = whole_layer.ours_experts(SHAPE, inputs, whole_layer.KINDS["top_k"], backend)
    torch.testing.assert_close(whole.forward()[0], alone.forward()[0])


def test_ratios_of_known_times():
    names = ("top_k", "nearest", "top_k experts", "nearest experts")
    times = {
        "top_k": (10.0, 30.0),
        "nearest": (9.0, 25.0),
        "top_k experts": (8.0, 27.0),
        "nearest experts": (7.0, 20.0),
    }
    results = {f"b {name}": {"forward_ms": times[name][0], "both_ms": times[name][1]} for name in names}
    found = whole_layer.ratios(results, "b")
    assert found["routing_share_of_forward"] == pytest.approx(0.2)
    assert found["rounding_gain_both"] == pytest.approx(1.2)
    assert found["rounding_gain_both_without_routing"] == pytest.approx(1.35)
    assert "over_sonicmoe_both" not in found
    results["sonicmoe"] = {"forward_ms": 11.0, "both_ms": 33.0}
    assert whole_layer.ratios(results, "b")["over_sonicmoe_both"] == pytest.approx(1.1)
    results["sonicmoe"] = {"outlasted_s": 5.0}
    assert "over_sonicmoe_both" not in whole_layer.ratios(results, "b")


def test_a_first_step_is_the_sum_of_its_parts(monkeypatch, capsys):
    monkeypatch.setitem(cold_start.SHAPES, "small", SHAPE)
    monkeypatch.setattr("sys.argv", ["cold_start", "small", "portable", "cpu"])
    cold_start.main()
    found = json.loads(capsys.readouterr().out)
    parts = ("imports_s", "routing_s", "experts_forward_s", "backward_s")
    assert found["first_step_s"] == pytest.approx(sum(found[part] for part in parts))
    assert all(found[part] > 0 for part in (*parts, "second_step_s"))
