import json
from pathlib import Path

import pytest
import torch

from checkpoint.state import TrainState
from checkpoint.store import save_checkpoint
from launch.plan import Plan, make_plan
from launch.preflight import EXIT_FITS, EXIT_REFUSED, EXIT_TOO_LARGE, compose_run, main
from model.attend import AttentionKernel
from moe_kernels import BackendName
from moe_kernels.dispatch import BACKENDS
from training.build import Kernels, build_model
from training.optim import build_optimizer
from training.world import World

PORTABLE = Kernels(BACKENDS[BackendName.portable], AttentionKernel.sdpa)
OLMOE = ["model=olmoe_1b_7b", "train.precision=bf16", "data.sequence_length=4096", "train.global_batch_sequences=8"]


def plan_of(*overrides: str, tokens: float | None = None) -> Plan:
    return make_plan(
        compose_run(list(overrides)).config,
        PORTABLE,
        name="tiny",
        gpus=1,
        gpu_bytes=2**40,
        context_bytes=0,
        fragmentation=0.0,
        tokens=tokens,
        tokens_per_s_per_gpu=None,
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_that_fits_leaves_with_0_and_one_that_does_not_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *OLMOE, "--gpus", "2")
    assert code == EXIT_FITS
    assert "of 139: fits" in out
    code, out, _ = run(capsys, *OLMOE, "--gpus", "2", "--gpu-memory-gib", "40")
    assert code == EXIT_TOO_LARGE
    assert "of 40: DOES NOT FIT" in out


def test_what_is_assumed_is_said_and_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *OLMOE, "--gpus", "2", "--json")
    default = json.loads(out)
    options = ["--context-gib", "10", "--fragmentation", "0.5"]
    _, out, _ = run(capsys, *OLMOE, "--gpus", "2", "--json", *options)
    more = json.loads(out)
    assert default["needed_bytes"] > default["peak"]["bytes"] == more["peak"]["bytes"]
    assert more["needed_bytes"] == int(1.5 * more["peak"]["bytes"]) + 10 * 2**30
    _, out, _ = run(capsys, *OLMOE, "--gpus", "2", *options)
    assert "assumed beyond that" in out
    assert "context and NCCL 10 GiB, fragmentation 50% of the peak" in out


def test_json_holds_what_the_tables_say(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        *OLMOE,
        "--gpus",
        "2",
        "--tokens",
        "1e12",
        "--throughput",
        "50000",
        "--json",
        "routing@model.moe.routing=top_k",
    )
    plan = json.loads(out)
    assert code == EXIT_FITS
    assert plan["peak"]["bytes"] == sum(plan["peak"]["parts"].values()) == max(m["bytes"] for m in plan["moments"])
    assert plan["tokens_per_step"] == 8 * 4096
    assert plan["days"] == pytest.approx(1e12 / (2 * 50_000 * 86_400))
    assert {row["busiest"] for row in plan["imbalances"]} == {2048, 4096, 16384}
    assert {row["rows"] for row in plan["imbalances"]} == {16384 * 8}
    assert len(plan["alternatives"]) == 8
    assert [row["peak"] for row in plan["alternatives"] if row["is_chosen"]] == [plan["peak"]["bytes"]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["optim.lr=-1", "--gpus", "1"], "optim.lr"),
        (["optimm.lr=1", "--gpus", "1"], "optimm"),
        (["+no_such_key=1", "--gpus", "1"], "no_such_key"),
        (["model=no_such_model", "--gpus", "1"], "olmoe_1b_7b"),
        (["--gpus", "3"], "train.global_batch_sequences"),
        (["train.global_batch_sequences=16", "parallel.shard_degree=3", "--gpus", "4"], "parallel.shard_degree"),
        (["train.global_batch_sequences=384", "model.moe.expert_width=72", "--gpus", "96"], "model.moe.expert_width"),
        (["kernels.backend=reference", "--gpus", "1"], "kernels.backend"),
        (["kernels.backend=cute_sm100", "--gpus", "1"], "kernels.backend=cute_sm100"),
        (["kernels.backend=cute_sm90", "--gpus", "1"], "bfloat16"),
        ([*OLMOE, "model.moe.routing.tile_m=64", "--gpus", "1"], "tile_m=64"),
        (["kernels.attention=flex", "--gpus", "1"], "data.mask_documents=false"),
        (["kernels.attention=flash_attn_4", "data.mask_documents=true", "--gpus", "1"], "data.mask_documents=true"),
        ([*OLMOE, "kernels.attention=flash_attn_4", "train.precision=fp32", "--gpus", "1"], "in 16 bits"),
        ([*OLMOE, "kernels.attention=flash_attn_4", "model.attention.head_width=132", "--gpus", "1"], "head_width=132"),
        (["parallel=null", "--gpus", "1"], "configs/parallel/ (fsdp, hsdp, one_host)"),
        (
            [*("parallel.cuda_graph=true", "parallel.compile=false", "data.mask_documents=true"), "--gpus", "1"],
            "kernels.attention=sdpa",
        ),
        (["--gpus", "1", "--benchmark", "no_such_file.json"], "no_such_file.json"),
    ],
)
def test_what_train_would_refuse_leaves_with_2_and_names_the_knob(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (EXIT_REFUSED, "")
    assert err.startswith("error: ")
    assert named in err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--gpu-memory-gib", "--tokens", "--throughput", "--context-gib", "--fragmentation"])
def test_options_that_are_no_amounts_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--gpus", "1", option, value])
    assert left.value.code == EXIT_REFUSED
    assert f"{option} {value}" in capsys.readouterr().err


def test_a_shape_without_a_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--gpus", "1", "--shape", "olmoe-1b-7b"])
    assert left.value.code == EXIT_REFUSED
    assert "--benchmark" in capsys.readouterr().err


def test_auto_plans_for_the_hopper_kernels_where_the_shape_allows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "experts on cute_sm90" in run(capsys, *OLMOE, "--gpus", "1")[1]
    _, out, _ = run(capsys, *OLMOE, "model.moe.expert_width=100", "--gpus", "1", "model.moe.routing.tile_m=128")
    assert "experts on cute_sm90" not in out


def test_throughput_is_read_from_the_row_that_is_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(gpus: int, speed: float, **other: str) -> dict[str, object]:
        names = {"shape": "olmoe_1b_7b", "routing": "token_rounding", "backend": "cute_sm90"} | other
        return {**names, "gpus": gpus, "tokens_per_s_per_gpu": speed}

    rows = [row(1, 100.0), row(2, 200.0), row(8, 800.0), row(2, 7.0, routing="top_k"), row(2, 9.0, backend="portable")]
    path = tmp_path / "train_step.json"
    path.write_text(json.dumps({"rows": rows}))
    arguments = [*OLMOE, "--gpus", "2", "--benchmark", str(path), "--json"]
    assert json.loads(run(capsys, *arguments)[1])["tokens_per_s_per_gpu"] == 200.0
    _, out, _ = run(capsys, *arguments[:-1])
    assert "note    --benchmark: the last row that fits; 2 GPUs; knobs may differ" in out
    top_k = [*arguments, "routing@model.moe.routing=top_k"]
    assert json.loads(run(capsys, *top_k)[1])["tokens_per_s_per_gpu"] == 7.0
    path.write_text(json.dumps({"rows": [*rows, row(2, 300.0, attention="sdpa")]}))
    _, out, _ = run(capsys, *arguments[:-1])
    assert "the last row that fits of 2, from 200 to 300 tokens/s/GPU; 2 GPUs, attention sdpa;" in out
    path.write_text(json.dumps({"rows": [row(2, 50.0, shape="their-name") | {"parameters": 6_919_161_856}]}))
    assert json.loads(run(capsys, *arguments)[1])["tokens_per_s_per_gpu"] == 50.0
    path.write_text(json.dumps({"runs": [{"rows": rows[:1]}, {"rows": rows[1:]}]}))
    assert json.loads(run(capsys, *arguments)[1])["tokens_per_s_per_gpu"] == 200.0
    path.write_text(json.dumps({"rows": [row(2, 50.0) | {"parameters": 6_919_161_857}]}))
    assert run(capsys, *arguments)[0] == EXIT_REFUSED  # a model of this name, and another size
    for speed, gpus in ((0.0, 2), (-5.0, 2), (float("nan"), 2), (float("inf"), 2), (50.0, 0)):
        path.write_text(json.dumps({"rows": [row(gpus, speed)]}))
        code, _, err = run(capsys, *arguments)
        assert code == EXIT_REFUSED
        assert "must be above 0" in err
    path.write_text(json.dumps({"rows": rows}))
    code, _, err = run(capsys, *arguments, "--shape", "another")
    assert code == EXIT_REFUSED
    assert "olmoe_1b_7b, top_k, cute_sm90" in err


def test_gradients_that_wait_are_told_with_the_knob_that_sums_them(capsys: pytest.CaptureFixture[str]) -> None:
    accumulating = [*OLMOE, "train.global_batch_sequences=32", "--gpus", "2"]
    knob = "parallel.sum_every_micro_batch=true"
    assert "gradients waiting to be summed" in run(capsys, *accumulating)[1]
    told = json.loads(run(capsys, *accumulating, "--json")[1])
    summed = json.loads(run(capsys, *accumulating, knob, "--json")[1])
    assert told["peak_if_summed_bytes"] == summed["peak"]["bytes"] < told["peak"]["bytes"]
    assert summed["peak_if_summed_bytes"] is None


def test_tokens_are_those_of_the_ramp_and_the_rest() -> None:
    ramp = "train.batch_ramp=[{until_step: 10, sequences: 4}, {until_step: 30, sequences: 8}]"
    plan = plan_of(ramp, "train.num_steps=100", "train.global_batch_sequences=16")
    assert plan.tokens == (10 * 4 + 20 * 8 + 70 * 16) * 256
    assert plan_of(tokens=5e9).tokens == 5e9


def test_a_checkpoint_takes_the_disk_that_was_planned(tmp_path: Path) -> None:
    plan = plan_of("model.num_layers=2")
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    model = build_model(plan.config, PORTABLE, alone)
    optimizer = build_optimizer(model, plan.config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainState(step=1, tokens=1, samples=1, wandb_id=None)
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=state, config={}, keep=1)
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    # The rest is metadata, less for each byte the larger the model is.
    assert plan.checkpoint_bytes()["one checkpoint"] == pytest.approx(written, rel=0.03)
