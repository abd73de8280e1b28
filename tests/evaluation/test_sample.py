"""Samples from an export: the same seed draws the same text, and what cannot be drawn is refused."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from checkpoint.export_hf import ExportOptions, export
from evaluation.sample import main, sample


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    path = Path(__file__).resolve().parents[1] / "checkpoint" / "make_exports.py"
    spec = importlib.util.spec_from_file_location("make_exports", path)
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    folder = tmp_path_factory.mktemp("sample")
    run = tiny.write_run(folder / "run", tiny.OLMOE)
    export(run, folder / "export", options=ExportOptions(compare_logits=False))
    return folder / "export"


def test_the_seed_decides_the_sample(exported):
    first = sample(exported, "The mill", max_new_tokens=12, seed=1)
    assert first.startswith("The mill")
    assert len(first) > len("The mill")
    assert sample(exported, "The mill", max_new_tokens=12, seed=1) == first
    assert sample(exported, "The mill", max_new_tokens=12, seed=2) != first


def test_temperature_zero_does_not_depend_on_the_seed(exported):
    greedy = [sample(exported, "The mill", max_new_tokens=12, temperature=0, seed=seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_no_more_tokens_are_drawn_than_there_are_positions(exported):
    text = sample(exported, "The mill", max_new_tokens=1000)
    assert 0 < len(AutoTokenizer.from_pretrained(exported).encode(text, add_special_tokens=False)) <= 64 + 1


def test_what_cannot_be_drawn_is_refused_in_one_line(exported, tmp_path, capsys):
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sample(exported, "The mill", **wrong)
    with pytest.raises(ValueError, match="prompt has 0 tokens"):
        sample(exported, "")
    assert main([str(tmp_path / "absent"), "--prompt", "x"]) == 1
    assert "is not a folder" in capsys.readouterr().err
    assert main([str(exported), "--prompt", "The mill", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("The mill")


def test_a_run_is_told_from_an_export(exported, capsys):
    run = exported.with_name("run")
    assert main([str(run), "--prompt", "The mill"]) == 1
    error = capsys.readouterr().err
    assert f"{run} is a run, not an export: python -m evaluation.generate {run} --prompt TEXT" in error
    assert f"python -m checkpoint.export_hf {run} OUT" in error
