import argparse
from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.options import names_of, output_file


def test_names_are_split_and_an_unknown_one_is_named_with_those_there_are() -> None:
    parse = names_of(["one", "two", "three"])
    assert parse("two, one") == ["two", "one"]
    with pytest.raises(argparse.ArgumentTypeError, match="tow, : not of one, two, three"):
        parse("one,tow,")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert not (tmp_path / "new.json").exists()
    for path in (tmp_path, tmp_path / "none" / "new.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="no file that can be written"):
            output_file(str(path))


def test_what_runs_on_a_gpu_only_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        memory.main(["--backends", "portable,cute_sm90"])
    assert "cute_sm90: torch finds no CUDA device" in capsys.readouterr().err
