import argparse
from pathlib import Path

import pytest

from benchmarks import memory, moe_layer
from benchmarks.options import at_least, names_of, need_backends, output_file
from benchmarks.shapes import SHAPES, MoEShape


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
    assert "cute_sm90: torch finds no CUDA device to run them on; portable and reference run" in capsys.readouterr().err


def test_numbers_too_small_or_none_are_refused() -> None:
    assert at_least(1)("7") == 7
    assert at_least(0, float)("0.5") == 0.5
    for parse, text, message in (
        (at_least(1), "0", "0 is less than 1"),
        (at_least(1), "2.5", "'2.5' is no int"),
        (at_least(0, float), "-1", "-1 is less than 0"),
        (at_least(0, float), "nan", "nan is less than 0"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse(text)


def test_a_backend_that_cannot_run_a_shape_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_kernels.dispatch.arch_of", lambda device: "sm80")
    need_backends(["portable"], [SHAPES["olmoe"]])
    with pytest.raises(SystemExit, match=r"error: the backend portable cannot run D=64, N=12.*N=12 is not a multiple"):
        need_backends(["portable"], [MoEShape(T=8, D=64, N=12, E=4, K=2)])
    with pytest.raises(SystemExit, match=r"error: the backend cute_sm90 cannot run .*sm90 .*, not sm80"):
        need_backends(["portable", "cute_sm90"], [SHAPES["olmoe"]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cold-start --routing zipf", "--cold-start times the whole layer"),
        ("--cold-start --with-routing", "--cold-start times the whole layer"),
        ("--cold-start --backends sonicmoe", "--cold-start times the whole layer"),
        ("--with-routing --ops", "--ops times the ops of the experts alone"),
        ("--routing rounded --backends sonicmoe,grouped_mm", "sonicmoe, grouped_mm take top-K routing only"),
        ("--rounds 0", "0 is less than 1"),
        ("--peer-limit-s -1", "-1 is less than 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["moe_layer", *options.split()])
    with pytest.raises(SystemExit):
        moe_layer.main()
    assert message in capsys.readouterr().err


def test_nothing_to_measure_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.main(["--backends", "scattermoe"])
    assert "none of --backends scattermoe is there to be measured" in capsys.readouterr().err
