"""train.py as a user starts it: in a process of its own, with what a tired user types wrong."""

import signal
import subprocess
import sys
from pathlib import Path

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
