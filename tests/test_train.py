"""train.py as a user starts it: in a process of its own, with what a tired user types wrong."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from checkpoint.metrics import read_metrics
from tests.training.processes import free_port
from training.config import RunConfig
from training.sinks import JsonlSink
from training.world import World

ROOT = Path(__file__).parent.parent
SMALL = (
    *("debug=cpu_smoke", "model.vocab_size=512", "model.width=32", "model.num_layers=1", "model.attention.num_heads=1"),
    *("model.attention.num_kv_heads=1", "data.sequence_length=512", "model.moe.routing.tile_m=64"),
    *("train.micro_batch_sequences=4", "train.global_batch_sequences=8", "train.num_threads=1"),
)


def train(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_misspelt_key_stops_with_one_short_message() -> None:
    result = train("model.moe.num_expert=64")
    assert result.returncode != 0
    assert "Key 'num_expert' not in 'MoEConfig'" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_cannot_work_stops_with_one_line_that_names_the_knobs(tmp_path: Path) -> None:
    result = train("model.moe.experts_per_token=100", f"run.root={tmp_path}")
    assert result.returncode != 0
    assert result.stderr.startswith(
        "error: model.moe.experts_per_token=100 must lie between 1 and model.moe.num_experts"
    )
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_key_added_with_plus_stops_with_one_line() -> None:
    result = train("+optim.lrr=1e-3")
    assert result.returncode != 0
    assert "lrr" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_root_that_is_a_file_stops_with_one_line(prepared_root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    small = ("debug=cpu_smoke", "model.vocab_size=512", "data.sequence_length=64", "model.moe.routing.tile_m=32")
    result = train(*small, f"data.root={prepared_root}", f"run.root={tmp_path / 'file'}")
    assert result.returncode != 0
    assert result.stderr.startswith(f"error: run.root={tmp_path / 'file'}")
    assert "Traceback" not in result.stderr


def test_a_gradient_that_is_not_finite_while_steps_are_recorded_ends_in_a_message(
    prepared_root: Path, tmp_path: Path
) -> None:
    result = train(
        *(*SMALL, f"data.root={prepared_root}", f"run.root={tmp_path}", "checkpoint.every_steps=0"),
        *("optim.lr=1e10", "optim.warmup_fraction=0", "train.num_steps=40", "logging.every_steps=10"),
        *("profile=true", "profiler.skip_steps=0", "profiler.num_steps=20"),
    )
    assert result.returncode == 1, result.stderr
    assert "the gradient norm is nan" in result.stderr
    assert "optim.lr" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_told_with_the_runs_folder(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from train import run

    def disk_is_full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def end(world: World, exit_code: int, *, alone: bool) -> None:
        assert alone
        sys.exit(exit_code)

    config = small_run()
    monkeypatch.setattr(World, "leave", end)
    for place, verb in ((JsonlSink, "stops"), (Path, "cannot start")):
        config.run.name = verb.split()[-1]
        try:
            with monkeypatch.context() as patch:
                patch.setattr(place, "write" if place is JsonlSink else "write_text", disk_is_full)
                with pytest.raises(SystemExit) as ended:
                    run(OmegaConf.structured(config))
            assert ended.value.code == 1
        finally:
            torch.distributed.destroy_process_group()
        folder = Path(config.run.root) / config.run.name
        place_of_run = f"the run in {folder} (run.root, run.name)"
        assert capfd.readouterr().err == f"error: {place_of_run} {verb}: [Errno 28] No space left on device\n"


def test_a_group_without_a_choice_is_named() -> None:
    result = train("parallel=null")
    assert result.returncode == 1
    assert result.stderr.startswith("error: parallel=null ")
    assert "one_host" in result.stderr
    assert "Traceback" not in result.stderr


def test_cfg_job_prints_the_configuration_and_writes_nothing(tmp_path: Path) -> None:
    result = train("--cfg", "job", "experiment=train_top_k", cwd=tmp_path)
    assert result.returncode == 0
    assert "tiny_train_top_k" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_experiments() -> None:
    result = train("--help")
    assert result.returncode == 0
    assert "experiment: round_down, round_up, train_top_k" in result.stdout


def test_sigterm_saves_and_the_same_command_goes_on(prepared_root: Path, tmp_path: Path) -> None:
    command = [
        *("debug=cpu_smoke", "train.num_steps=100000", "evaluation.every_steps=0", "model.vocab_size=512"),
        *(
            "data.sequence_length=64",
            "model.moe.routing.tile_m=32",
            f"data.root={prepared_root}",
            f"run.root={tmp_path}",
        ),
    ]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *command], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(60) == 75
    (checkpoint,) = sorted((tmp_path / "cpu_smoke" / "checkpoints").glob("step_*"))[-1:]
    step = int(checkpoint.name.removeprefix("step_"))
    resumed = train(*command, f"run.stop_at_step={step + 1}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"at step {step}," in resumed.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu_smoke"]


def test_ctrl_c_before_the_first_step_ends_in_a_line(prepared_root: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *SMALL, f"data.root={prepared_root}", f"run.root={tmp_path}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("I training.environment")  # the model is yet to be built
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.stderr.read() == "interrupted: nothing was saved that was not before\n"
    assert process.wait(60) == 130


def test_train_runs_from_any_folder(prepared_root: Path, tmp_path: Path) -> None:
    result = train(
        *("debug=cpu_smoke", "train.num_steps=1", "model.vocab_size=512", "data.sequence_length=64"),
        *("model.moe.routing.tile_m=32", f"data.root={prepared_root}", "run.root=here"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "here" / "cpu_smoke" / "config.yaml").exists()


def test_a_run_goes_on_with_other_numbers_of_processes_across_an_epochs_end(
    prepared_root: Path, tmp_path: Path
) -> None:
    places = (f"data.root={prepared_root}", f"run.root={tmp_path}")
    arguments = [*SMALL, *places, "train.num_steps=18", "evaluation.every_steps=9"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for stop, launcher in ((15, torchrun), (17, [sys.executable]), (18, torchrun)):
        command = [*launcher, str(ROOT / "train.py"), *arguments, "run.name=parts", f"run.stop_at_step={stop}"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        assert result.returncode == 0, result.stderr
    assert train(*arguments, "run.name=whole", cwd=tmp_path).returncode == 0
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    epochs = {line["progress/step"]: line["progress/epoch"] for line in whole}
    assert epochs[16] < 1 < epochs[17]  # in the part of the one process
    assert [line["progress/step"] for line in parts] == [line["progress/step"] for line in whole]
    for left, right in zip(whole, parts, strict=True):
        for name in ("loss/ce", "loss/load_balance", "optim/grad_norm", "eval/held_out/ce_top_k"):
            assert (name in left) == (name in right)
            if name in left:
                assert left[name] == pytest.approx(right[name], rel=1e-5), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


def test_two_agents_that_meet_at_a_rendezvous_train_one_run(prepared_root: Path, tmp_path: Path) -> None:
    port = free_port()
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    agent += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "two"]
    arguments = [*SMALL, "train.num_steps=2", f"data.root={prepared_root}", f"run.root={tmp_path}"]
    command = [*agent, str(ROOT / "train.py"), *arguments]
    agents = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent_process in agents:
            agent_process.kill()
    assert [agent.returncode for agent in agents] == [0, 0]
    assert sorted("step 2/2" in output for output in outputs) == [False, True]
    assert train(*arguments, "run.name=alone", cwd=tmp_path).returncode == 0
    together, alone = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("cpu_smoke", "alone"))
    assert together[-1]["eval/held_out/ce_top_k"] == pytest.approx(alone[-1]["eval/held_out/ce_top_k"], rel=1e-5)
