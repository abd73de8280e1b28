"""Exports as transformers 4.57 reads them: nothing missing, the same logits and text, the same configuration."""

import json
import shutil

import pytest
import torch
import transformers

from checkpoint.verify_hf import REFERENCE, verify

pytestmark = pytest.mark.hf4
MAJOR = int(transformers.__version__.split(".")[0])


def test_an_export_loads_whole_and_computes_the_same(export):
    report = verify(export, export / REFERENCE)
    assert report["complaints"] == []
    assert report["loading"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    receipt = json.loads((export / "gristmill_receipt.json").read_text())
    assert set(report["logits"]) == {"float32", receipt["dtype"]}
    for logits in report["logits"].values():
        assert logits["max_logit"] > 1, "logits near zero would agree with anything"
        assert logits[logits["judged_by"]] <= logits["allowed"]
    there = receipt["reload"]["greedy"]
    assert report["greedy"]["ids_transformers"] == there["ids_transformers"] == there["ids_ours"]
    assert report["greedy"]["text_transformers"] == there["text_transformers"]


def test_every_field_of_config_json_is_read_as_written(export):
    written = json.loads((export / "config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(export)
    for key, value in written.items():
        if key in ("dtype", "torch_dtype"):
            assert read.dtype == getattr(torch, value)
        elif key == "rope_theta" and MAJOR >= 5:
            assert read.rope_parameters[key] == value
        else:
            assert getattr(read, key) == value, key
    assert transformers.GenerationConfig.from_pretrained(export).eos_token_id == written["eos_token_id"]


def test_a_config_without_the_older_spelling_would_be_misread(export, tmp_path):
    if MAJOR >= 5:
        pytest.skip("transformers 5 reads the newer spelling")
    folder = shutil.copytree(export, tmp_path / "newer_spelling_alone")
    values = json.loads((folder / "config.json").read_text())
    del values["rope_theta"]
    (folder / "config.json").write_text(json.dumps(values))
    assert any("logits" in complaint for complaint in verify(folder, folder / REFERENCE)["complaints"])
