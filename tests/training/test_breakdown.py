"""The table of a step's time: its rows sum to the step whatever overlaps, and kernels land in their rows."""

import errno
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import training.profiling
from tests.training.test_trainer import logged
from training.breakdown import (
    COMMUNICATION,
    DATA,
    DATA_WAIT,
    IDLE,
    WINDOW,
    Breakdown,
    Sizes,
    break_down,
)
from training.config import DeviceName, RunConfig
from training.trainer import EXIT_DONE, Trainer
from training.world import World, open_world

SIZES = Sizes(num_experts=64, vocab_size=50304)
T, D = 4096, 2048
Event = dict[str, Any]


class Trace:
    """Builds a trace: what happens on the host, and kernels that are launched within it. Times are in microseconds."""

    def __init__(self, start: float, end: float) -> None:
        self.events: list[Event] = [self._host(WINDOW, start, end, cat="user_annotation")]

    def _host(
        self, name: str, start: float, end: float, *, cat: str = "cpu_op", dims: Any = None, tid: int = 1
    ) -> Event:
        args = {} if dims is None else {"Input Dims": dims}
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}

    def host(self, name: str, start: float, end: float, **options: Any) -> None:
        self.events.append(self._host(name, start, end, **options))

    def kernel(
        self, name: str, start: float, end: float, *, launched: float, tid: int = 1, cat: str = "kernel"
    ) -> None:
        number = len(self.events)
        launch = self._host("cudaLaunchKernel", launched, launched + 0.1, cat="cuda_runtime", tid=tid)
        launch["args"]["correlation"] = number
        kernel = self._host(name, start, end, cat=cat, tid=7)
        kernel["args"]["correlation"] = number
        self.events += [launch, kernel]

    def table(self, num_steps: int = 1) -> Breakdown:
        return break_down(self.events, SIZES, num_steps=num_steps)


def microseconds(table: Breakdown) -> dict[str, float]:
    return {row: round(seconds * 1e6, 6) for row, seconds in table.rows.items()}


def test_overlap_is_shared_communication_is_exposed_only_alone_and_the_rest_is_idle_or_waiting() -> None:
    trace = Trace(0, 100)
    trace.kernel("elementwise_a", 10, 30, launched=1)
    trace.kernel("nvjet_gemm", 20, 30, launched=2)  # 10 µs beside the first: 5 each
    trace.kernel("ncclDevKernel_AllGather", 25, 50, launched=3)  # 5 hidden, 20 exposed
    trace.host(DATA, 55, 70, cat="user_annotation")
    trace.kernel("elementwise_b", 60, 65, launched=4)  # splits the wait into 5 and 5
    table = trace.table()
    assert microseconds(table) == {
        "norms and elementwise": 10 + 5 + 5,
        "dense products": 5,
        COMMUNICATION: 20,
        DATA_WAIT: 10,
        IDLE: 10 + 5 + 30,
    }
    assert table.communication_hidden_s == pytest.approx(5e-6)
    assert sum(table.rows.values()) == pytest.approx(table.step_s) == pytest.approx(100e-6)


def test_rows_are_means_over_the_steps_and_what_lies_outside_the_window_is_cut_off() -> None:
    trace = Trace(100, 200)
    trace.kernel("elementwise", 50, 120, launched=40)
    trace.kernel("elementwise", 190, 260, launched=180)
    trace.kernel("elementwise", 210, 260, launched=205)
    assert microseconds(trace.table(num_steps=2)) == {"norms and elementwise": 15, IDLE: 35}


def rows_of(place: Callable[[Trace], None]) -> set[str]:
    trace = Trace(0, 1000)
    place(trace)
    return set(trace.table().rows) - {IDLE}


KERNELS: dict[str, tuple[str, Any, str]] = {
    # kernel: operator it is launched in, that operator's input sizes, row
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": ("aten::mm", [[T, D], [D, D]], "dense products"),
    "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT": ("aten::mm", [[T, D], [D, 64]], "router product"),
    "nvjet_tst_128x128_NN": ("aten::mm", [[T, 128], [128, D]], "router product"),  # 2 E columns in its backward
    "nvjet_tst_256x128_TNN": ("aten::mm", [[T, D], [D, 50304]], "embedding, head and loss"),
    "cunn_SoftMaxForward": ("aten::_log_softmax", [[T, 50304]], "embedding, head and loss"),
    "indexing_backward_kernel": ("aten::embedding_dense_backward", [[T, D], [T]], "embedding, head and loss"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": ("aten::_cudnn", [], "attention"),
    "flash_fwd_kernel": ("aten::_scaled_dot_product_flash_attention", [], "attention"),
    "triton_poi_fused__scaled_dot_product_flash_attention_mul_3": ("triton", [], "norms and elementwise"),
    "forward_kernel": ("gristmill::weigh_and_choose", [[T, 64]], "routing"),
    "multi_tensor_apply_kernel<FusedAdam>": ("Optimizer.step#AdamW.step", [], "optimiser and clipping"),
    "copy_kernel": ("FSDP::all_gather_copy_out (blocks.3)", [], "copies for sharding"),
    "ncclDevKernel_ReduceScatter_Sum_f32": ("FSDP::post_backward_reduce", [], COMMUNICATION),
    "vectorized_elementwise_kernel": ("aten::mul", [[T, D], [T, D]], "norms and elementwise"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_lands_in_the_row_it_belongs_to(name: str) -> None:
    operator, dims, row = KERNELS[name]

    def place(trace: Trace) -> None:
        category = "cpu_op" if operator.startswith("aten") else "user_annotation"
        trace.host(operator, 10, 20, dims=dims, cat=category)
        trace.kernel(name, 30, 40, launched=15)

    assert rows_of(place) == {row}


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_products_of_the_experts_are_told_apart_by_their_order_in_the_op(recomputes: bool) -> None:
    trace = Trace(0, 1000)
    product, gradient, combine = "kernel_cutlass_GroupedGemm_0", "kernel_cutlass_WeightGrad_0", "_combine"
    calls = {
        "gristmill::moe_experts_fwd": [product, product, combine],
        "gristmill::moe_experts_bwd": [product] * (1 + recomputes),
        "gristmill::moe_experts_bwd_down": [gradient],
        "gristmill::moe_experts_bwd_up": [product, combine, gradient],
    }
    time = 0.0
    for layer in range(2):  # two calls of each, so that counting starts anew
        for op, kernels in calls.items():
            trace.host(op, time, time + 10, tid=2)
            for place, kernel in enumerate(kernels):
                trace.kernel(
                    kernel,
                    time + 10 * place + 400 * layer,
                    time + 10 * place + 10 + 400 * layer,
                    launched=time + 1 + place,
                    tid=2,
                )
            time += 40
    again = {"experts: up again": 20} if recomputes else {}
    assert {row: us for row, us in microseconds(trace.table()).items() if row != IDLE} == again | {
        "experts: up": 20,
        "experts: down": 20,
        "experts: gather-sum": 40,
        "experts: down backward": 20,
        "experts: dw_down": 20,
        "experts: dx": 20,
        "experts: dw_gate_up": 20,
    }


def test_on_the_cpu_time_goes_to_the_innermost_operator_of_the_thread_that_takes_the_steps() -> None:
    trace = Trace(0, 100)
    trace.host("aten::linear", 10, 60)
    trace.host("aten::mm", 20, 50)
    trace.host("aten::add", 60, 70)
    trace.host("aten::copy_", 0, 100, tid=9)  # another thread's
    assert microseconds(trace.table()) == {"aten::linear": 20, "aten::mm": 30, "aten::add": 10, "Python": 40}


def test_a_trace_without_its_window_is_refused() -> None:
    with pytest.raises(ValueError, match="train/steps"):
        break_down([], SIZES, num_steps=1)


def test_the_text_has_every_row_and_the_sum() -> None:
    trace = Trace(0, 100)
    trace.kernel("ncclDevKernel", 0, 50, launched=1)
    trace.kernel("elementwise", 10, 40, launched=2)
    lines = trace.table().as_text().splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        IDLE,
        "norms and elementwise",
        COMMUNICATION,
        "step",
        "communication, hidden",
    ]
    assert "100.0%" in lines[4]


ALONE = World(rank=0, size=1, device=torch.device("cpu"))
PROFILED = (
    *("profile=true", "profiler.skip_steps=1", "profiler.num_steps=2", "evaluation.max_sequences=8"),
    *("model.num_layers=1", "train.global_batch_sequences=8", "train.num_steps=4", "checkpoint.every_steps=0"),
)


def test_profile_true_leaves_trace_and_table_of_the_steps_named(
    small_run: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    config = small_run(*PROFILED)
    trainer = Trainer(config, ALONE)
    with caplog.at_level("INFO"):
        trainer.fit()
    folder = Path(config.run.root) / config.run.name / "profile"
    stem = "steps_00000003_to_00000004"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{stem}.{kind}" for kind in ("time.json", "time.txt", "trace.json.gz")
    ]
    assert "profile of steps 3 to 4" in caplog.text
    table = json.loads((folder / f"{stem}.time.json").read_text())
    assert sum(table["rows"].values()) == pytest.approx(table["step_s"])
    assert table["rows"]["aten::mm"] > 0
    assert table["rows"]["Python"] < table["step_s"]
    trace = gzip.decompress((folder / f"{stem}.trace.json.gz").read_bytes()).decode()
    assert "traceEvents" in trace
    assert trace.count('"train/clip"') == 3  # the step to warm up in, and the two


def test_no_evaluation_and_no_save_is_recorded(small_run: Callable[..., RunConfig]) -> None:
    config = small_run(*PROFILED, "profiler.skip_steps=3", "train.num_steps=10", "evaluation.every_steps=5")
    trainer = Trainer(config, ALONE)
    trainer.fit()
    # Steps 5 to 6, which skip_steps asks for, have an evaluation between them, and one just before them would be in
    # the trace.
    (trace,) = trainer.folder.profile.glob("*.trace.json.gz")
    assert trace.name == "steps_00000008_to_00000009.trace.json.gz"
    text = gzip.decompress(trace.read_bytes()).decode()
    assert text.count('"train/clip"') == text.count('"aten::_log_softmax"') == 3  # one forward a step


def test_a_profile_that_cannot_be_written_warns_and_leaves_no_part_of_it(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_half(_: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write_half)
    trainer = Trainer(small_run(*PROFILED), ALONE)
    assert trainer.fit() == EXIT_DONE
    assert trainer.state.step == 4
    assert list(trainer.folder.profile.iterdir()) == []
    assert f"the profile cannot be written to {trainer.folder.profile}" in caplog.text
    assert "No space left on device" in caplog.text


def test_what_writes_the_profile_is_not_in_the_time_of_a_step(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace = training.profiling.read_trace

    def read_slowly(path: Path) -> Any:
        time.sleep(1)
        return read_trace(path)

    monkeypatch.setattr(training.profiling, "read_trace", read_slowly)
    config = small_run(*PROFILED, "profiler.num_steps=1", "train.num_steps=5")
    Trainer(config, ALONE).fit()
    lines = [line for line in logged(config) if "loss/ce" in line]
    assert len(lines) == 5
    assert max(line["time/step_s"] for line in lines[1:]) < 0.5


def test_what_is_open_when_an_error_ends_the_steps_is_closed(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(small_run(*PROFILED), ALONE)
    take_step = trainer._step

    def fail_in_step_3() -> Any:
        if trainer.state.step == 2:
            assert torch.autograd._profiler_enabled()
            raise FloatingPointError
        return take_step()

    monkeypatch.setattr(trainer, "_step", fail_in_step_3)
    with pytest.raises(FloatingPointError):
        trainer.fit()
    assert not torch.autograd._profiler_enabled()


def test_a_run_too_short_for_its_profile_says_so(
    small_run: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(small_run("profile=true", "checkpoint.every_steps=0"), ALONE).fit()
    assert "the run ended before profiler.skip_steps=10" in caplog.text


@pytest.mark.gpu
def test_profile_on_a_gpu_splits_the_devices_time_and_leaves_a_memory_snapshot(
    small_run: Callable[..., RunConfig],
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    world = open_world(DeviceName.cuda)
    config = small_run(
        *("profile=true", "profiler.skip_steps=1", "profiler.num_steps=2", "train.precision=bf16"),
        *("parallel.compile=false", "kernels=portable", "evaluation.max_sequences=8", "checkpoint.every_steps=0"),
        "train.micro_batch_sequences=4",  # with 8 there are as many tokens as words, and every product is the head's
    )
    trainer = Trainer(config, world)
    trainer.fit()
    world.close()
    (table_file,) = trainer.folder.profile.glob("*.time.json")
    table = json.loads(table_file.read_text())
    assert table["device"] == "device time"
    assert sum(table["rows"].values()) == pytest.approx(table["step_s"])
    for row in ("attention", "routing", "router product", "dense products", "optimiser and clipping"):
        assert table["rows"].get(row, 0.0) > 0, f"{row}: {[(k['row'], k['name']) for k in table['kernels']]}"
    assert any(row.startswith("experts") for row in table["rows"])
    (snapshot,) = trainer.folder.profile.glob("*.memory.pickle")
    assert snapshot.stat().st_size > 0
