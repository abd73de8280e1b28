import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training import sinks
from training.config import LoggingConfig, RunConfig, WandbMode
from training.trainer import Trainer as TrainerOfWorld
from training.world import World

SmallRun = Callable[..., RunConfig]
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def Trainer(config: RunConfig) -> TrainerOfWorld:
    return TrainerOfWorld(config, ALONE)


class FakeRun:
    """Records what a wandb run is told."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.id = options["id"]
        self.axes: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, float]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)

    def finish(self) -> None:
        self.finished = True


class FakeWandb:
    """Stands where the package would."""

    class errors:  # noqa: N801 - the package's module of that name
        class Error(Exception):
            pass

    def __init__(self, *, has_key: bool, key_is_malformed: bool = False, is_reachable: bool = True) -> None:
        self.runs: list[FakeRun] = []
        self._has_key = has_key
        self._key_is_malformed = key_is_malformed
        self._is_reachable = is_reachable

    def login(self, **_: bool) -> bool:
        if self._key_is_malformed:
            raise self.errors.Error("API key must have 40+ characters")
        return self._has_key

    def init(self, **options: Any) -> FakeRun:
        if options["mode"] == "online" and not self._is_reachable:
            raise self.errors.Error("failed to get resume status")
        self.runs.append(FakeRun(**options))
        return self.runs[-1]


def test_jsonl_appends_one_object_a_line(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = sinks.JsonlSink(tmp_path / "metrics.jsonl", start={"progress/step": step - 1})
        sink.write({"progress/step": step, "loss/ce": 0.1})
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"progress/step": 1, "loss/ce": 0.1},
        {"progress/step": 1, "progress/resumed": 1.0},
        {"progress/step": 2, "loss/ce": 0.1},
    ]


@pytest.mark.parametrize(
    ("mode", "has_key", "expected"),
    [
        (WandbMode.auto, True, "online"),
        (WandbMode.auto, False, "offline"),
        (WandbMode.offline, True, "offline"),
        (WandbMode.online, False, "online"),
    ],
)
def test_wandb_goes_online_only_with_a_key_or_when_told(
    mode: WandbMode, has_key: bool, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fake = FakeWandb(has_key=has_key)
    monkeypatch.setattr(sinks, "import_wandb", lambda: fake)
    sink = sinks.WandbSink(LoggingConfig(wandb=mode), run_name="r", folder=tmp_path, run_id="abc", values={})
    assert sink.mode == fake.runs[0].options["mode"] == expected


def test_a_resumed_run_keeps_its_wandb_id_and_its_axis_is_tokens(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb(has_key=True)
    monkeypatch.setattr(sinks, "import_wandb", lambda: fake)
    monkeypatch.setattr("training.trainer.import_wandb", lambda: fake)
    for stop in (3, 6):
        Trainer(small_run("logging.wandb=offline", f"run.stop_at_step={stop}")).fit()
    first, second = fake.runs
    assert first.id == second.id
    for run in fake.runs:
        assert run.axes == [("progress/tokens", None), ("*", "progress/tokens")]
        assert run.finished
    logged = [line["progress/tokens"] for line in first.logged + second.logged]
    assert logged == sorted(logged)
    assert first.options["config"]["optim"]["lr"] == 0.003


def test_the_real_package_writes_an_offline_run_and_the_log_says_how_to_upload_it(
    small_run: SmallRun, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    config = small_run("logging.wandb=offline", "run.stop_at_step=1", f"run.root='{tmp_path}/my runs'")
    with caplog.at_level("INFO"):
        trainer = Trainer(config)
        trainer.fit()
    (folder,) = (trainer.folder.path / "wandb").glob(f"offline-run-*-{trainer.state.wandb_id}")
    assert next(folder.glob("*.wandb")).stat().st_size > 0
    assert f"wandb sync '{trainer.folder.path / 'wandb'}'/offline-run-*-{trainer.state.wandb_id}" in caplog.text


def test_a_missing_wandb_package_is_refused_with_both_ways_out(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install .*logging=jsonl"):
        Trainer(small_run("logging.wandb=auto"))
    assert not (tmp_path / "runs").exists()


def test_training_without_wandb_does_not_import_it(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Trainer(small_run("run.stop_at_step=1")).fit()


@pytest.mark.parametrize("trouble", [{"key_is_malformed": True}, {"is_reachable": False}])
def test_wandb_in_auto_falls_back_to_offline_with_a_warning(
    trouble: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fake = FakeWandb(has_key=True, **trouble)
    monkeypatch.setattr(sinks, "import_wandb", lambda: fake)
    auto = LoggingConfig(wandb=WandbMode.auto)
    sink = sinks.WandbSink(auto, run_name="r", folder=tmp_path, run_id="abc", values={})
    assert sink.mode == fake.runs[-1].options["mode"] == "offline"
    assert "written offline" in caplog.text


def test_wandb_online_that_fails_is_refused_with_both_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb(has_key=True, is_reachable=False)
    monkeypatch.setattr(sinks, "import_wandb", lambda: fake)
    online = LoggingConfig(wandb=WandbMode.online)
    with pytest.raises(sinks.StartError, match=r"logging\.wandb=online.*logging=offline.*logging=jsonl"):
        sinks.WandbSink(online, run_name="r", folder=tmp_path, run_id="abc", values={})


def test_a_line_that_a_crash_cut_off_is_removed_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"progress/step": 1}\n{"progress/step": 2, "loss')
    sink = sinks.JsonlSink(path, start={"progress/step": 1})
    sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"progress/step": 1},
        {"progress/step": 1, "progress/resumed": 1.0},
    ]


def test_a_sink_that_cannot_be_closed_hides_no_error_and_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    class Closing:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def write(self, metrics: dict[str, float]) -> None:
            pass

        def close(self) -> None:
            closed.append(self)
            if self.error is not None:
                raise self.error

    broken = [Closing(OSError("disk full")), Closing(OSError("still full")), Closing(None)]
    with pytest.raises(ValueError, match="the checkpoint"), sinks.Sinks([*broken]):
        raise ValueError("the checkpoint could not be written")
    assert closed == broken
    assert "disk full" in caplog.text
    closed.clear()
    with pytest.raises(OSError, match="disk full"), sinks.Sinks([*broken]):
        pass
    assert closed == broken
