"""The step's benchmark takes the steps of a run: rows are whole, figures fit each other, losses are real."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.steps import RandomRows, Steps, compose_run, draw_on_device
from benchmarks.train_step import Choice, build_parser, main, run_config
from training.config import DeviceName
from training.world import World, open_world

TINY = (
    *("--shapes", "tiny", "--layers", "1", "--sequence-length", "64", "--micro-batch-sequences", "8"),
    *("--tile-m", "32", "--precision", "fp32", "--warm-up", "1", "--steps", "2", "--window", "1"),
)
SMALLER = ("model.width=32", "model.moe.num_experts=8", "model.moe.experts_per_token=2", "model.vocab_size=512")
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def rows_of(path: Path, *options: str) -> list[dict[str, Any]]:
    assert main([*TINY, *options, "--json", str(path), "--set", *SMALLER]) == 0
    record = json.loads(path.read_text())
    assert record["torch"] == torch.__version__
    return record["rows"]


def test_every_routing_has_a_row_whose_figures_fit_each_other(prepared_root: Path, tmp_path: Path) -> None:
    options = ("--data", str(prepared_root), "--routing", "top_k,token_rounding", "--backends", "portable")
    rows = rows_of(tmp_path / "out.json", *options, "--no-profile")
    assert [row["routing"] for row in rows] == ["top_k", "token_rounding"]
    for row in rows:
        assert (row["shape"], row["gpus"], row["layers"], row["text"]) == ("tiny", 1, 1, "prepared text")
        assert (row["backend"], row["checkpointing"]) == ("portable", "selective")
        assert row["tokens_per_s_per_gpu"] == pytest.approx(512 / row["step_s"])
        assert row["tokens_per_day"] == pytest.approx(86_400 * row["tokens_per_s_per_gpu"])
        assert len(row["window_step_s"]) == 2
        assert len(row["losses"]) == 3
        assert row["mfu_causal"] is None  # no peak is known for a CPU
        assert row["peak_gib"] is None
    # The same weights and the same text, routed in two ways.
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=0.1)
    assert rows[0]["losses"] != pytest.approx(rows[1]["losses"], rel=1e-6)


def test_the_split_of_the_time_sums_to_the_profiled_step_and_its_trace_is_kept(tmp_path: Path) -> None:
    options = ("--routing", "top_k", "--backends", "portable", "--random-tokens", "--micro-batch-sequences", "4")
    (row,) = rows_of(tmp_path / "out.json", *options, "--traces", str(tmp_path / "traces"))
    assert sum(row["time"]["rows"].values()) == pytest.approx(row["time"]["step_s"])
    assert row["time"]["rows"]["aten::mm"] > 0
    assert len(list((tmp_path / "traces").glob("*.trace.json.gz"))) == 1


def test_random_tokens_are_used_only_when_said(tmp_path: Path) -> None:
    options = ("--routing", "top_k", "--backends", "portable", "--no-profile")
    (row,) = rows_of(tmp_path / "out.json", *options, "--random-tokens")
    assert row["text"] == "random tokens"
    assert "time" not in row
    with pytest.raises(SystemExit, match=r"^error: data\.root=.*nowhere"):
        main([*TINY, *options, "--data", str(tmp_path / "nowhere"), "--set", *SMALLER])
    torch.distributed.destroy_process_group()


def test_what_cannot_run_here_ends_in_a_message_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "take", lambda steps: pytest.fail("a step was taken"))
    with pytest.raises(SystemExit, match=r"^error: no MoE backend for kernels\.backend=cute_sm90"):
        # In fp32, which it has on no machine.
        main([*TINY, "--random-tokens", "--backends", "portable,cute_sm90", "--set", *SMALLER])
    torch.distributed.destroy_process_group()
    with pytest.raises(SystemExit, match=r"--shapes knows .*tiny, not huge"):
        main(["--shapes", "tiny,huge"])


def test_no_recorder_is_left_open_when_a_recorded_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Steps.take

    def fail_while_recorded(steps: Steps) -> Any:
        if torch.autograd._profiler_enabled():
            raise FloatingPointError("step 4")
        return take(steps)

    monkeypatch.setattr(Steps, "take", fail_while_recorded)
    with pytest.raises(SystemExit, match="error: step 4"):
        main([*TINY, "--random-tokens", "--backends", "portable", "--routing", "top_k", "--set", *SMALLER])
    torch.distributed.destroy_process_group()
    assert not torch.autograd._profiler_enabled()


def test_options_reach_the_configuration() -> None:
    sets = ("--set", "parallel.prefetch_blocks=1", "optim.lr=1e-3", "--set", "optim.weight_decay=0.5")
    arguments = build_parser().parse_args(["--compile", "--accumulation", "2", *sets])
    world = World(rank=0, size=2, device=torch.device("cpu"))
    config = run_config(arguments, Choice("sonic-7b", "token_rounding", "portable", "full"), world)
    assert (config.model.width, config.model.num_layers) == (1536, 40)
    assert config.train.global_batch_sequences == 4 * 2 * 2
    assert config.parallel.compile is True
    assert config.parallel.activation_checkpointing.value == "full"
    assert config.parallel.prefetch_blocks == 1
    assert (config.optim.lr, config.optim.weight_decay) == (1e-3, 0.5)
    assert config.model.moe.routing.train.value == "token_rounding"


def test_steps_are_those_of_a_run(small_run: Any, tmp_path: Path) -> None:
    from tests.training.test_trainer import logged
    from training.trainer import Trainer

    config = small_run("train.num_steps=3")
    Trainer(config, ALONE).fit()
    steps = Steps(config, ALONE)
    losses = [float(steps.take().losses.total) for _ in range(3)]
    steps.close()
    assert losses == [line["loss/total"] for line in logged(config) if "loss/total" in line]


def test_weights_drawn_on_the_device_have_the_scale_of_a_runs(prepared_root: Path) -> None:
    world = open_world(DeviceName.cpu)
    config = compose_run(
        *("debug=cpu_smoke", "train.precision=bf16", f"data.root={prepared_root}", "model.vocab_size=512"),
        *("model.num_layers=1", "data.sequence_length=64", "model.moe.routing.tile_m=32", "model.moe.router=sigmoid"),
    )
    steps = Steps(config, world, draws_on_device=True)
    for name, parameter in steps.model.named_parameters():
        whole = parameter.full_tensor()
        if name.endswith("norm.weight"):
            assert torch.equal(whole, torch.ones_like(whole)), name
        else:
            assert float(whole.detach().std()) == pytest.approx(config.model.init_std, rel=0.1), name
    assert torch.isfinite(steps.take().losses.ce)
    steps.close()
    world.close()


def test_random_rows_differ_from_sample_to_sample_and_shift_their_labels() -> None:
    rows = RandomRows(compose_run("debug=cpu_smoke"))
    first, again, other = rows.batch(0, 2), rows.batch(0, 2), rows.batch(2, 2)
    assert torch.equal(first.input_ids_BS, again.input_ids_BS)
    assert not torch.equal(first.input_ids_BS, other.input_ids_BS)
    assert torch.equal(first.input_ids_BS[:, 1:], first.labels_BS[:, :-1])


def test_draw_on_device_leaves_nothing_as_it_was() -> None:
    from tests.training.test_step import build

    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    draw_on_device(model)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in_place"])
@pytest.mark.usefixtures("small_parts_in_place")
def test_nothing_of_a_row_stays_for_the_next(in_place: bool, sharded_world: World) -> None:
    config = compose_run(
        *("model=tiny", *SMALLER, "model.num_layers=1", "data.root=none", "data.sequence_length=64"),
        *("kernels=portable", "routing@model.moe.routing=top_k", "train.precision=bf16"),
        *("train.micro_batch_sequences=2", "train.global_batch_sequences=2"),
        *("parallel.reshard_after_forward=false", f"parallel.gather_in_place={in_place}"),
    )
    steps = Steps(config, sharded_world, random_tokens=True)
    steps.take()
    parts = [weakref.ref(parameter._local_tensor) for parameter in steps.model.parameters()]  # type: ignore[attr-defined]
    steps.close()
    assert len(parts) > 5
    assert [part for part in parts if part() is not None] == []
