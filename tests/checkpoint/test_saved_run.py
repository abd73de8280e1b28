"""Runs as they are read: the losses a checkpoint had, and files that are damaged or not the run's, by name."""

import hashlib
import json
from pathlib import Path

import pytest

from checkpoint import export_hf
from checkpoint.export_hf import ExportOptions, export
from checkpoint.saved_run import HeldOutLosses, open_saved_run

FILES_ONLY = ExportOptions(compare_logits=False)


def losses_after(run: Path, *lines: str) -> HeldOutLosses | None:
    (run / "metrics.jsonl").write_bytes("\n".join(lines).encode())
    return open_saved_run(run).held_out_losses()


def evaluated(step: int, loss: float) -> str:
    return json.dumps({"progress/step": step, "eval/held_out/ce_top_k": loss})


def test_the_held_out_loss_is_the_last_one_that_this_checkpoint_can_have_had(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    resumed = json.dumps({"progress/step": 4, "progress/resumed": 1.0})
    train = json.dumps({"progress/step": 7, "loss/ce": 3.0})
    losses = losses_after(run, evaluated(4, 5.0), evaluated(6, 4.0), resumed, train, evaluated(8, 1.0), "")
    assert losses == (4, {"eval/held_out/ce_top_k": 5.0}), "the evaluation at step 6 was lost in a crash"
    losses = losses_after(run, evaluated(4, 5.0), evaluated(6, 4.0), resumed, evaluated(6, 3.5), "")
    assert losses == (6, {"eval/held_out/ce_top_k": 3.5})
    assert losses_after(run, evaluated(8, 1.0), "") is None
    assert losses_after(run, "") is None
    (run / "metrics.jsonl").unlink()
    assert open_saved_run(run).held_out_losses() is None


def test_a_line_of_metrics_that_cannot_be_read_is_named_unless_it_is_still_being_written(tmp_path, tiny, capsys):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    cut = evaluated(7, 1.0)[:-9]
    assert losses_after(run, evaluated(6, 4.0), cut) == (6, {"eval/held_out/ce_top_k": 4.0})
    for wrong in (cut, "3", "[]", '{"loss/ce": 1.0}', "\x00", ""):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a JSON object with progress/step"):
            losses_after(run, evaluated(6, 4.0), wrong, evaluated(7, 4.0), "")
    assert export_hf.main([str(run), str(tmp_path / "out"), "--no-compare"]) == 1
    assert "metrics.jsonl, line 2" in capsys.readouterr().err


def test_another_tokenizer_than_that_of_the_data_is_refused(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    path = run / "tokenizer" / "tokenizer.json"
    manifests = [{"tokenizer_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]
    (run / "data.json").write_text(json.dumps(manifests))
    assert export(run, tmp_path / "first", options=FILES_ONLY)["vocabulary"]["exported_rows"] == 320
    tiny.edit_json(path, version="1.1")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer that the model was trained with"):
        export(run, tmp_path / "out", options=FILES_ONLY)
    for damaged in (b"", b"{}", b"[]", b"[3]", b"[{}]", b"\xff" * 5000):
        (run / "data.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"data\.json is damaged") as error:
            export(run, tmp_path / "out", options=FILES_ONLY)
        assert len(str(error.value)) < 500, "a message is no copy of the file"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["model: [", "3", "", "model:\n  widht: 3\n", "model: {width: x}", "model: 4", "\x00"], ids=repr
)
def test_a_damaged_config_is_refused_with_its_path(tmp_path, tiny, capsys, text):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    (run / "config.yaml").write_text(text)
    assert export_hf.main([str(run), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {run / 'config.yaml'} is damaged or of another version: ")
