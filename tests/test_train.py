"""train.py as a user starts it: in a process of its own, with what a tired user types wrong."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.summary import read_metrics

ROOT = Path(__file__).parent.parent


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
    assert result.stderr.startswith("error: ")
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


def test_train_runs_from_any_folder(prepared_root: Path, tmp_path: Path) -> None:
    result = train(
        *("debug=cpu_smoke", "train.num_steps=1", "model.vocab_size=512", "data.sequence_length=64"),
        *("model.moe.routing.tile_m=32", f"data.root={prepared_root}", "run.root=here"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "here" / "cpu_smoke" / "config.yaml").exists()


def test_a_run_goes_on_with_other_numbers_of_processes(prepared_root: Path, tmp_path: Path) -> None:
    arguments = [
        *("debug=cpu_smoke", "evaluation.every_steps=3", "model.vocab_size=512", "data.sequence_length=64"),
        *("model.moe.routing.tile_m=32", "train.global_batch_sequences=8", "train.num_threads=1"),
        *(f"data.root={prepared_root}", f"run.root={tmp_path}"),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for stop, launcher in ((2, torchrun), (4, [sys.executable]), (6, torchrun)):
        command = [*launcher, str(ROOT / "train.py"), *arguments, "run.name=parts", f"run.stop_at_step={stop}"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        assert result.returncode == 0, result.stderr
    assert train(*arguments, "run.name=whole", cwd=tmp_path).returncode == 0
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [line["progress/step"] for line in parts] == [line["progress/step"] for line in whole]
    for left, right in zip(whole, parts, strict=True):
        for name in ("loss/ce", "loss/load_balance", "optim/grad_norm", "eval/held_out/ce_top_k"):
            assert (name in left) == (name in right)
            if name in left:
                assert left[name] == pytest.approx(right[name], rel=1e-5), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]
