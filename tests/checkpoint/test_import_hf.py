"""Imports: what was exported comes back bit for bit, and folders that would be misread are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint import import_hf as importer
from checkpoint.export_hf import ExportOptions, export
from checkpoint.hf_weights import meta_decoder
from checkpoint.import_hf import import_hf, write_import
from checkpoint.saved_run import model_config, open_saved_run
from checkpoint.store import load_weights

FILES_ONLY = ExportOptions(compare_logits=False, serve=())
UNPADDED = {"vocab_size": 320}


def exported(tmp_path: Path, tiny, name: str, change: dict | None = None, **options) -> tuple[Path, Path]:
    """Return (run, export) of one of the small models, without padded rows."""
    base, changes, _ = tiny.EXPORTS[name]
    values = tiny.changed(tiny.changed(base, changes), UNPADDED | (change or {}))
    run = tiny.write_run(tmp_path / f"run-{name}", values)
    export(run, tmp_path / name, options=ExportOptions(compare_logits=False, serve=(), **options))
    return run, tmp_path / name


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype == torch.float32
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", ["olmoe", "olmoe_all", "qwen3_moe", "qwen3_moe_all"])
@pytest.mark.parametrize("shard_bytes", [4 << 30, 60_000])
def test_importing_an_export_gives_back_config_and_weights_bit_for_bit(tmp_path, tiny, name, shard_bytes):
    run, folder = exported(tmp_path, tiny, name, shard_bytes=shard_bytes)
    config, weights = import_hf(folder)
    assert config == open_saved_run(run).config
    assert_same_weights(tiny.weights_of(run), weights)


@pytest.mark.parametrize("name", ["olmoe_all", "qwen3_moe_all"])
@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
def test_what_transformers_5_saves_is_read(tmp_path, tiny, name, fused):
    run, folder = exported(tmp_path, tiny, name)
    saved = tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(saved, save_original_format=not fused)
    names = {key for path in saved.glob("*.safetensors") for key in load_file(path)}
    assert any(key.endswith("experts.gate_up_proj") for key in names) == fused
    config, weights = import_hf(saved)
    assert config == open_saved_run(run).config
    assert_same_weights(tiny.weights_of(run), weights)


@pytest.mark.parametrize("text", ["", "{", '{"model": {"type": "BPE"}}'], ids=repr)
def test_a_damaged_tokenizer_is_named(tmp_path, tiny, capsys, text):
    run, folder = exported(tmp_path, tiny, "olmoe")
    for tokenizer in (folder / "tokenizer.json", run / "tokenizer" / "tokenizer.json"):
        tokenizer.write_text(text)
    assert importer.main([str(folder), str(tmp_path / "imported")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {folder / 'tokenizer.json'} is damaged")
    assert not any(tmp_path.glob("imported*"))
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        open_saved_run(run)


def test_an_import_that_cannot_be_written_or_read_is_told_in_one_line(tmp_path, tiny, capsys):
    _, folder = exported(tmp_path, tiny, "olmoe")
    (tmp_path / "file").touch()
    assert importer.main([str(folder), str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(tmp_path / "file") in error
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert importer.main([str(folder), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_narrow_export_comes_back_as_its_rounded_weights_in_fp32(tmp_path, tiny):
    run, folder = exported(tmp_path, tiny, "qwen3_moe", dtype_name="bfloat16")
    rounded = {name: tensor.bfloat16().float() for name, tensor in tiny.weights_of(run).items()}
    assert_same_weights(rounded, import_hf(folder)[1])


def test_the_written_folder_loads_and_can_be_exported_again(tmp_path, tiny, capsys):
    run, folder = exported(tmp_path, tiny, "qwen3_moe_all")
    assert importer.main([str(folder), str(tmp_path / "imported")]) == 0
    checkpoint = tmp_path / "imported" / "checkpoints" / "step_00000000"
    assert str(checkpoint) in capsys.readouterr().out
    decoder = meta_decoder(open_saved_run(tmp_path / "imported").config).to_empty(device="cpu")
    load_weights(checkpoint, decoder)
    assert_same_weights(tiny.weights_of(run), dict(decoder.state_dict()))
    export(tmp_path / "imported", tmp_path / "again", options=FILES_ONLY)
    for path in folder.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    first, second = (json.loads((where / "config.json").read_text()) for where in (folder, tmp_path / "again"))
    assert first.pop("router_aux_loss_coef") == 0.005
    assert first == second
    with pytest.raises(ValueError, match="exists"):
        write_import(folder, tmp_path / "imported")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not one of"),
        ({"num_local_experts": 7}, "num_experts=6 and num_local_experts=7 disagree"),
        ({"torch_dtype": "bfloat16"}, "dtype=float32 and torch_dtype=bfloat16 disagree"),
        ({"rope_theta": 10000.0}, r"rope_theta=10000\.0 and rope_parameters=.*1000000.* disagree"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
            "our rotary embedding is the plain one",
        ),
    ],
)
def test_a_config_that_our_decoder_would_misread_is_refused(tmp_path, tiny, changes, message):
    _, folder = exported(tmp_path, tiny, "qwen3_moe")
    tiny.edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        import_hf(folder)


def test_a_config_in_the_older_spelling_alone_means_the_same(tmp_path, tiny):
    run, folder = exported(tmp_path, tiny, "qwen3_moe_all")
    values = json.loads((folder / "config.json").read_text())
    for newer in ("rope_parameters", "num_local_experts", "dtype"):
        del values[newer]
    (folder / "config.json").write_text(json.dumps(values))
    assert import_hf(folder)[0] == open_saved_run(run).config


def edit_tensors(folder: Path, edit) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_tensors_are_refused_by_name(tmp_path, tiny):
    _, folder = exported(tmp_path, tiny, "olmoe")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:, :40].clone()}))
    with pytest.raises(ValueError, match=rf"{name} in .* has shape \(16, 40\), .* needs \(16, 48\)"):
        import_hf(folder)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"has no {name}, which blocks\.1\.moe\.w_gate_up is made of \(1 are missing"):
        import_hf(folder)


def test_a_tensor_without_a_place_is_refused_but_old_rotary_tables_are_not(tmp_path, tiny):
    _, folder = exported(tmp_path, tiny, "olmoe")
    edit_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    )
    import_hf(folder)
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    with pytest.raises(ValueError, match=r"1 tensors .* no place for, first model\.layers\.0\.self_attn\.q_proj\.bias"):
        import_hf(folder)


def test_a_shape_that_config_json_contradicts_is_refused(tmp_path, tiny):
    _, folder = exported(tmp_path, tiny, "olmoe")
    tiny.edit_json(folder / "config.json", vocab_size=321)
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens\.weight in .* has shape \(320, 48\), .* needs \(321, 48\)"
    ):
        import_hf(folder)


def test_a_tied_head_may_be_saved_if_it_is_the_embedding(tmp_path, tiny):
    run, folder = exported(tmp_path, tiny, "qwen3_moe", {"tie_embeddings": True})
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same_weights(tiny.weights_of(run), import_hf(folder)[1])
    edit_tensors(folder, lambda t: t["lm_head.weight"].view(-1)[3:4].add_(1))
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
        import_hf(folder)


def test_an_index_that_names_an_absent_file_is_refused(tmp_path, tiny):
    _, folder = exported(tmp_path, tiny, "olmoe", shard_bytes=60_000)
    next(folder.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match=r"names model-00002-of-.* is not there"):
        import_hf(folder)
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        import_hf(folder)


def test_a_name_on_the_hub_is_downloaded_and_then_read_like_a_folder(tmp_path, tiny, monkeypatch):
    run, folder = exported(tmp_path, tiny, "olmoe")
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(importer, "snapshot_download", download)
    assert_same_weights(tiny.weights_of(run), import_hf("someone/some-model")[1])
    assert asked == [("someone/some-model", ["*.json", "*.safetensors", "*.jinja"])]
    with pytest.raises(ValueError, match="neither a folder nor a name on the Hub"):
        import_hf("no-such-folder")


def test_released_configs_are_read_as_their_sizes_say(tmp_path):
    """The values of OLMoE-1B-7B's config.json, in the spelling and with the gaps that transformers 4 left."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["OlmoeForCausalLM"],
                "model_type": "olmoe",
                "hidden_size": 2048,
                "intermediate_size": 1024,
                "max_position_embeddings": 4096,
                "num_attention_heads": 16,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 16,
                "num_key_value_heads": 16,
                "rope_scaling": None,
                "rope_theta": 10000.0,
                "torch_dtype": "bfloat16",
                "vocab_size": 50304,
            }
        )
    )
    from checkpoint.hf_config import from_hf_config

    released = {
        "vocab_size": 50304,
        "width": 2048,
        "num_layers": 16,
        "attention": {"num_heads": 16, "num_kv_heads": 16, "head_width": 128, "qk_norm": "full_width"},
        "moe": {"num_experts": 64, "experts_per_token": 8, "expert_width": 1024},
    }
    assert from_hf_config(tmp_path) == model_config(released)
