import json
from pathlib import Path

import pytest

from evaluation.summary import main

MANIFEST = {"unigram_ce_train_fit": 6.7, "unigram_entropy_held_out": 6.5, "held_out": {"tokens": 100}}


def run_folder(path: Path, lines: list[dict[str, float]]) -> Path:
    (path / "checkpoints" / "step_00000020").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "data.json").write_text(json.dumps([MANIFEST]))
    return path


def step(number: int, **metrics: float) -> dict[str, float]:
    return {"progress/step": number, "progress/tokens": number * 100.0, **metrics}


LINES = [
    step(10, **{"loss/ce": 6.0}),
    step(20, **{"loss/ce": 5.0, "throughput/tokens_per_day": 2e9}),
    step(
        20, **{"eval/held_out/ce_top_k": 5.4, "eval/held_out/ce_train_routing": 5.41, "eval/held_out/routing_gap": 0.01}
    ),
]


def test_summary_shows_losses_gap_unigram_and_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_folder(tmp_path, LINES))])
    printed = capsys.readouterr().out
    for value in (
        "20 steps, 2,000 tokens",
        "5.000",
        "5.400",
        "+0.0100",
        "6.500",
        "2.000 B tokens/day",
        "step_00000020",
    ):
        assert value in printed


def test_summary_leaves_out_what_was_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, LINES)
    (run / "checkpoints" / "step_00000030.partial").mkdir()
    receipt = {"family": "olmoe", "step": 20, "dtype": "bfloat16", "reload": "not compared"}
    for name in ("hf", "hf2.partial"):
        (run / name).mkdir()
        (run / name / "gristmill_receipt.json").write_text(json.dumps(receipt))
    main([str(run)])
    printed = capsys.readouterr().out
    assert "step_00000020" in printed
    assert f"{run / 'hf'}: olmoe" in printed
    assert "partial" not in printed


def test_a_last_line_that_is_still_being_written_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path, LINES)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"progress/step": 30, "loss')
    main([str(run)])
    assert "20 steps, 2,000 tokens" in capsys.readouterr().out
    (run / "metrics.jsonl").write_text('{"progress/step"')
    with pytest.raises(SystemExit, match="has not logged a step yet"):
        main([str(run)])


def test_a_line_that_is_damaged_is_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path, LINES)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write("damaged\n")
    with pytest.raises(SystemExit, match=r"metrics\.jsonl, line 4 is not a JSON object"):
        main([str(run)])


@pytest.mark.parametrize("contents", [None, b"", b"[{", b"{}x", b"[{}]", b"3", b"\xff\xfe"])
def test_manifests_that_are_missing_or_damaged_are_named(tmp_path: Path, contents: bytes | None) -> None:
    run = run_folder(tmp_path, LINES)
    (run / "data.json").unlink()
    if contents is not None:
        (run / "data.json").write_bytes(contents)
    with pytest.raises(SystemExit, match=r"^error: .*data\.json, which holds the manifests"):
        main([str(run)])


def test_margin_is_measured_from_the_lower_unigram_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(run_folder(tmp_path, LINES))
    main([run, "--require-margin", "1.0"])
    assert "1.100 nats/token below" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="misses the required margin"):
        main([run, "--require-margin", "1.2"])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not the folder of a run"):
        main([str(tmp_path)])
