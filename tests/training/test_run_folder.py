"""A run's folder: whose it is, what a damaged one says, and that nothing is written before a run can start."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training.config import RunConfig
from training.run_folder import RunFolder, differing_values, sole_trainer
from training.sinks import StartError
from training.trainer import Trainer as TrainerOfWorld
from training.world import World

SmallRun = Callable[..., RunConfig]


def Trainer(config: RunConfig) -> TrainerOfWorld:
    return TrainerOfWorld(config, World(rank=0, size=1, device=torch.device("cpu")))


def disk_is_full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def stopped_run(small_run: SmallRun) -> RunFolder:
    trainer = Trainer(small_run("run.stop_at_step=3"))
    trainer.fit()
    return trainer.folder


def test_differences_are_named_by_their_dotted_key() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "gone": True}
    now = {"a": {"b": 2, "c": [1, 2]}, "new": None, "d": {"e": 1}}
    assert differing_values(before, now) == [("a.b", 1, 2), ("d", None, {"e": 1}), ("gone", True, None)]


def test_equal_values_have_no_differences() -> None:
    assert differing_values({"a": {"b": [1]}}, {"a": {"b": [1]}}) == []


def test_checkpoints_without_a_configuration_are_refused_with_the_command_that_brings_it_back(
    small_run: SmallRun,
) -> None:
    folder = stopped_run(small_run)
    folder.config.unlink()
    for overrides in ((), ("optim.lr=1",)):
        with pytest.raises(ValueError, match=r"holds a run but no config\.yaml.*run\.name") as caught:
            Trainer(small_run(*overrides))
    command = re.search("`cp (.+) (.+)`", str(caught.value))
    assert command is not None
    shutil.copyfile(command[1], command[2])
    assert Trainer(small_run()).state.step == 3
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.003 in the run, 1\.0 now"):
        Trainer(small_run("optim.lr=1"))


def test_metrics_without_a_configuration_are_a_runs_too(small_run: SmallRun) -> None:
    folder = stopped_run(small_run)
    folder.config.unlink()
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(ValueError, match=r"no config\.yaml: give this run another name"):
        Trainer(small_run())


def test_a_damaged_configuration_is_named(small_run: SmallRun) -> None:
    folder = Trainer(small_run()).folder
    for damage in (b"model: {width: 32", b"\xff\xfe\x00", b"- 1\n- 2\n", b"no configuration\n"):
        folder.config.write_bytes(damage)
        with pytest.raises(ValueError, match=r"config\.yaml is ") as caught:
            Trainer(small_run())
        assert str(caught.value).startswith(str(folder.config)), damage


def test_damaged_and_missing_manifests_are_named(small_run: SmallRun) -> None:
    folder = Trainer(small_run()).folder
    for damage in (b"[{", b"\xff\xfe\x00", b"[1]", b'[{"train": 1}]', b"3"):
        folder.data.write_bytes(damage)
        with pytest.raises(ValueError, match=r"data\.json is damaged.*train\.init_from") as caught:
            Trainer(small_run())
        assert str(caught.value).startswith(str(folder.data)), damage
    folder.data.unlink()
    with pytest.raises(ValueError, match=r"data\.json is missing.*train\.init_from"):
        Trainer(small_run())


def test_a_refused_start_leaves_the_name_to_the_command_that_is_right(small_run: SmallRun) -> None:
    config = small_run("train.init_from=typo")
    with pytest.raises(ValueError, match="typo is not a run"):
        Trainer(config)
    assert not Path(config.run.root).exists()
    assert Trainer(small_run()).state.step == 0


def test_an_unfinished_save_gives_its_space_back_before_anything_is_written(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped_run(small_run)
    unfinished = folder.checkpoints / "step_00000009.partial"
    unfinished.mkdir()
    write_text = Path.write_text

    def write_where_there_is_room(path: Path, *options: Any, **named: Any) -> int:
        return disk_is_full() if unfinished.exists() else write_text(path, *options, **named)

    monkeypatch.setattr(Path, "write_text", write_where_there_is_room)
    resumed = Trainer(small_run("run.stop_at_step=4"))
    assert not unfinished.exists()
    assert "stop_at_step: 4" in folder.config.read_text()
    resumed.fit()
    assert resumed.state.step == 4


def test_the_configuration_of_a_run_that_another_process_trains_is_left(small_run: SmallRun) -> None:
    folder = Trainer(small_run()).folder
    before = folder.config.read_text()
    with sole_trainer(folder, is_first=True), pytest.raises(StartError, match=r"another process.*run\.name"):
        Trainer(small_run("run.stop_at_step=4"))
    assert folder.config.read_text() == before


def test_a_tokenizer_that_cannot_be_copied_is_told_in_words(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copyfile", disk_is_full)
    with pytest.raises(OSError, match=r"^the tokenizer cannot be copied into the run: .*No space left on device"):
        Trainer(small_run())


def test_files_that_did_not_change_are_not_written_again(small_run: SmallRun) -> None:
    folder = Trainer(small_run("run.stop_at_step=3")).folder
    before = [path.stat().st_mtime_ns for path in (folder.config, folder.data)]
    Trainer(small_run("run.stop_at_step=3"))
    assert [path.stat().st_mtime_ns for path in (folder.config, folder.data)] == before
    Trainer(small_run("run.stop_at_step=4"))
    assert folder.config.stat().st_mtime_ns > before[0]
    assert "stop_at_step: 4" in folder.config.read_text()
    assert len(json.loads(folder.data.read_text())) == 1
