"""launch/torchrun.sh: how many processes it starts, and what it says where it cannot know."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "torchrun.sh"


def launch(folder: Path, nvidia_smi: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this text as nvidia-smi; instead of Python, echo shows what it would start."""
    if nvidia_smi is not None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.defpath}", "PYTHON": "echo", **variables}
    return subprocess.run([SCRIPT, "a=b"], env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_is_started_for_every_gpu(tmp_path: Path) -> None:
    shown = launch(tmp_path, "echo 'GPU 0: NVIDIA H200 (UUID: x)'; echo 'GPU 1: NVIDIA H200 (UUID: y)'")
    assert shown.returncode == 0
    assert "--standalone --nproc_per_node 2 train.py a=b" in shown.stdout
    assert "--nproc_per_node 5 " in launch(tmp_path, "exit 9", GPUS="5").stdout


@pytest.mark.parametrize("nvidia_smi", ["exit 127", "echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices found'"])
def test_without_gpus_it_says_which_variable_to_set(tmp_path: Path, nvidia_smi: str) -> None:
    refused = launch(tmp_path, nvidia_smi)
    assert refused.returncode == 1
    assert "set GPUS=N" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize(("knob", "value"), [("GPUS", "two"), ("GPUS", "0"), ("GPUS", "-1"), ("NODES", "2x")])
def test_a_number_that_is_none_is_refused(tmp_path: Path, knob: str, value: str) -> None:
    refused = launch(tmp_path, None, **{"GPUS": "2", knob: value})
    assert refused.returncode == 1
    assert f"{knob}={value} is not a number" in refused.stderr


def test_several_hosts_need_a_place_to_meet(tmp_path: Path) -> None:
    refused = launch(tmp_path, None, GPUS="2", NODES="2")
    assert refused.returncode == 1
    assert "RENDEZVOUS=HOST:PORT" in refused.stderr


def test_a_run_that_is_told_to_stop_gets_time_to_save(tmp_path: Path) -> None:
    shows = tmp_path / "python"
    shows.write_text('#!/bin/sh\necho "waits $TORCH_ELASTIC_SHUTDOWN_TIMEOUT s"\n')
    shows.chmod(0o755)
    assert "waits 600 s" in launch(tmp_path, None, GPUS="2", PYTHON=str(shows)).stdout
    own = launch(tmp_path, None, GPUS="2", PYTHON=str(shows), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7")
    assert "waits 7 s" in own.stdout
