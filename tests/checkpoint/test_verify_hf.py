"""The comparison of an export with our logits: it passes what is right, and notices every kind of wrong."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import export_hf
from checkpoint.export_hf import UNFINISHED, ExportOptions, export
from checkpoint.hf_config import to_hf_config
from checkpoint.verify_hf import REFERENCE, tolerance, verify

FILES_ONLY = ExportOptions(compare_logits=False)


def spoil(tiny, folder: Path, how: str) -> None:
    if how == "rope theta":
        tiny.edit_json(
            folder / "config.json", rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        )
    elif how == "normalisation":
        tiny.edit_json(folder / "config.json", norm_topk_prob=True)
    elif how == "epsilon":
        tiny.edit_json(folder / "config.json", rms_norm_eps=1e-3)
    else:
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path)
        gate, up = (f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up"))
        if how == "one expert":
            tensors[gate], tensors[up] = tensors[up], tensors[gate]
        elif how == "missing tensor":
            del tensors["model.layers.0.self_attn.q_norm.weight"]
        elif how == "unexpected tensor":
            tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("rope theta", "logits in float32 differ"),
        ("normalisation", "logits in float32 differ"),
        ("epsilon", "logits in float32 differ"),
        ("one expert", "logits in float32 differ"),
        ("missing tensor", "missing_keys: model.layers.0.self_attn.q_norm.weight"),
        ("unexpected tensor", "unexpected_keys: model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_the_comparison_notices_what_is_wrong(tmp_path, tiny, how, complaint):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    export(run, tmp_path / "out", options=FILES_ONLY)
    assert tiny.verified(run, tmp_path / "out")["complaints"] == []
    spoil(tiny, tmp_path / "out", how)
    complaints = verify(tmp_path / "out", tmp_path / "out" / REFERENCE)["complaints"]
    assert any(complaint in text for text in complaints), complaints


def test_another_tokenizer_is_noticed(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    export(run, tmp_path / "out", options=FILES_ONLY)
    tiny.verified(run, tmp_path / "out")
    tiny.write_tokenizer(tmp_path / "other", vocab_size=300)
    (tmp_path / "out" / "tokenizer.json").write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    complaints = verify(tmp_path / "out", tmp_path / "out" / REFERENCE)["complaints"]
    assert complaints == ["the tokenizer gives other ids for the reference text than the run's"]


def test_an_export_that_transformers_disagrees_with_gets_no_name(tmp_path, tiny, monkeypatch):
    def wrong_theta(*args, **kwargs):
        return to_hf_config(*args, **kwargs) | {"rope_theta": 9.0, "rope_parameters": {"rope_theta": 9.0}}

    monkeypatch.setattr(export_hf, "to_hf_config", wrong_theta)
    monkeypatch.setattr(export_hf, "_compare", lambda partial, saved_run, _: tiny.verified(saved_run.path, partial))
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    with pytest.raises(ValueError, match=r"does not agree.*out\.partial(.|\n)*logits in float32 differ by"):
        export(run, tmp_path / "out", options=ExportOptions())
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / UNFINISHED).is_file()


def test_the_tolerance_is_far_below_what_a_wrong_setting_does():
    for num_layers, width in ((2, 48), (16, 2048), (48, 2048), (94, 4096)):
        assert tolerance(torch.float32, num_layers=num_layers, width=width) < 5e-4
        assert tolerance(torch.bfloat16, num_layers=num_layers, width=width) < 0.5
