"""What a layer holds and needs at its peak is what is counted: to the byte, if a backend allocates its outputs only."""

import json

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import counted_bytes, measure_shape
from benchmarks.shapes import MoEShape
from moe_kernels import BackendName
from moe_kernels.dispatch import BACKENDS
from moe_kernels.swiglu import DownGrads

CPU = torch.device("cpu")
SHAPES = {  # by the moment of the peak
    "y in the forward": MoEShape(T=512, D=64, N=16, E=16, K=16),
    "rows of dx": MoEShape(T=256, D=64, N=16, E=8, K=8),
    "dw_down, or if h was recomputed before it": MoEShape(T=512, D=128, N=128, E=2, K=2),
    "dw_gate_up": MoEShape(T=2, D=64, N=64, E=8, K=1),
}


class OutputsOnly:
    """A backend that allocates what the ops return and computes nothing."""

    name = "reference"

    def why_not(self, problem):
        return None

    def up(self, x_TD, w_gate_up, plan):
        return x_TD.new_empty(plan.R, w_gate_up.shape[1]), self.up_inference(x_TD, w_gate_up, plan)

    def up_inference(self, x_TD, w_gate_up, plan):
        return x_TD.new_empty(plan.R, w_gate_up.shape[1] // 2)

    def rows_matmul(self, rows_RX, w_EXY, plan):
        return rows_RX.new_empty(plan.R, w_EXY.shape[2])

    def gather_scores(self, score_TE, plan):
        return score_TE.new_empty(plan.R)

    def combine(self, rows_RD, score_R, plan):
        return rows_RD.new_empty(plan.T, rows_RD.shape[1])

    def down_backward(self, dout_TD, h_R2N, w_down, score_R, plan):
        scaled_a_RN = h_R2N.new_empty(plan.R, w_down.shape[2])
        return DownGrads(torch.empty_like(h_R2N), scaled_a_RN, score_R.new_empty(plan.T, plan.E))

    def weight_grad(self, left, right, plan, *, gathered):
        return left.new_empty(plan.E, left.shape[1], right.shape[1])


@pytest.mark.parametrize("name", SHAPES)
def test_our_layer_takes_what_is_counted(name, monkeypatch):
    monkeypatch.setitem(BACKENDS, BackendName.reference, OutputsOnly())
    results = measure_shape(SHAPES[name], ["reference"], {}, CPU)
    assert results["reference"] == results["by count"]
    assert results["reference recompute_h"] == results["by count recompute_h"]


def test_a_real_backend_holds_what_is_counted():
    shape = MoEShape(T=64, D=32, N=16, E=8, K=2)
    results = measure_shape(shape, ["portable"], {}, CPU)
    for suffix in ("", " recompute_h"):
        measured, counted = results["portable" + suffix], results["by count" + suffix]
        assert measured[:3] == counted[:3]
        assert measured.peak > counted.peak  # it writes the gathered rows
    h = 4 * 64 * 2 * 16
    assert results["portable"].held - results["portable recompute_h"].held == h


@pytest.mark.parametrize("model", ["1.4b", "7b", "30b", "120b"])
def test_what_is_held_does_not_grow_with_granularity(model):
    shapes = [shape for name, shape in memory.SHAPES.items() if name.startswith(f"{model}-")]
    held = [counted_bytes(shape, shape.T * shape.K, recompute_h=False).held for shape in shapes]
    assert len(held) == 3
    assert max(held) <= 1.01 * min(held)  # the rows' scores grow: 4 bytes beside 4 * N


def test_the_command_line_writes_every_contender(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(memory.SHAPES, "small", MoEShape(T=32, D=32, N=16, E=8, K=2))
    memory.main(["--shapes", "small", "--backends", "portable,scattermoe", "--json", str(tmp_path / "memory.json")])
    record = json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))
    rows = record["shapes"]["small"]
    assert rows.keys() == {"portable", "portable recompute_h", "by count", "by count recompute_h"}
    assert rows["portable"]["held"] == rows["by count"]["held"] > 0
    assert "scattermoe is not installed" in capsys.readouterr().out
