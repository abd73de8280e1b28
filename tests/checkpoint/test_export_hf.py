"""Exports: complete or absent, equal to the training code in transformers, and honest about what they hold."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig

from checkpoint import export_hf
from checkpoint.export_hf import RECEIPT, UNFINISHED, ExportOptions, export, size_in_bytes
from checkpoint.hf_names import to_hf
from checkpoint.hf_rules import Reader
from checkpoint.saved_run import model_config, open_saved_run
from checkpoint.store import save_weights

ROOT = Path(__file__).resolve().parents[2]
FILES_ONLY = ExportOptions(compare_logits=False)
FOR_TRANSFORMERS = ExportOptions(compare_logits=False, serve=())


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "dtype_name"), [("olmoe", "float32"), ("qwen3_moe", "bfloat16")], ids=["olmoe", "qwen3_moe"]
)
def test_an_export_is_compared_in_a_fresh_process_and_leaves_a_receipt(tmp_path, tiny, family, dtype_name):
    run = tiny.write_run(tmp_path / "my-run", tiny.OLMOE if family == "olmoe" else tiny.QWEN3)
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is no obstacle
    returned = export(run, out, options=ExportOptions(dtype_name=dtype_name))

    receipt = json.loads((out / RECEIPT).read_text())
    assert receipt == returned
    assert (receipt["run"], receipt["step"], receipt["tokens"]) == ("my-run", 7, 7000)
    assert (receipt["family"], receipt["dtype"]) == (family, dtype_name)
    assert receipt["vocabulary"] == {"trained_rows": 352, "exported_rows": tiny.VOCAB_SIZE}
    assert receipt["versions"]["torch"] == torch.__version__
    assert {rule["field"] for rule in receipt["rules"]} >= {"model.moe.router", "model.attention.qk_norm"}
    assert all(rule["holds"] for rule in receipt["rules"])
    reload = receipt["reload"]
    assert reload["complaints"] == []
    assert reload["loading"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    assert reload["tokens_compared"] == 128
    assert set(reload["logits"]) == {"float32", dtype_name}
    for logits in reload["logits"].values():
        assert logits[logits["judged_by"]] <= logits["allowed"]
        assert logits["max_logit"] > 1, "logits near zero would agree with anything"
    assert reload["greedy"]["same"]
    assert len(reload["greedy"]["ids_ours"]) == 24
    for name, known in receipt["files"].items():
        content = (out / name).read_bytes()
        assert known == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name
    assert set(receipt["files"]) | {RECEIPT} == {path.name for path in out.iterdir()}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


def test_the_receipt_says_what_torch_was_built_for(tmp_path, tiny, monkeypatch):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert export(run, tmp_path / "out", options=FILES_ONLY)["versions"]["torch"] == "2.13.0+cu130"


def test_the_model_card_is_filled_from_the_run(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.changed(tiny.OLMOE, {"tie_embeddings": True}))
    export(run, tmp_path / "out", options=FOR_TRANSFORMERS)
    card = (tmp_path / "out" / "README.md").read_text()
    for expected in (
        "| optimiser steps | 7 |",
        "| tokens | 7,000 |",
        "| held-out loss, top-K (nats per token), step 7 | 4.2500 |",  # not the later one's
        "| held-out loss, training routing (nats per token), step 7 | 4.5000 |",
        "token_rounding (nearest, tiles of 128)",
        "`OlmoeForCausalLM` in float32",
        "Not compared with `transformers`",
        "model.tie_embeddings=True: OlmoeForCausalLM in vllm needs false",
    ):
        assert expected in card, expected


@pytest.mark.parametrize("data", [None, {"mask_documents": False}, {"mask_documents": True}], ids=str)
def test_the_model_card_says_when_training_kept_attention_inside_documents(tmp_path, tiny, data):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    config = run / "config.yaml"
    config.write_text(config.read_text() + ("" if data is None else OmegaConf.to_yaml({"data": data})))
    export(run, tmp_path / "out", options=FOR_TRANSFORMERS)
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("give it one document in each sequence" in card) == (data == {"mask_documents": True})


EXPRESSIBLE = {
    "olmoe": [
        {"attention": {"num_kv_heads": 1}},
        {"moe": {"normalize_top_k": True}, "norm_eps": 1e-3},
        {"attention": {"clip_qkv": 0.3}, "tie_embeddings": True},
        {"attention": {"bias": True, "rope_theta": 123.0}, "moe": {"experts_per_token": 6}},
        {"vocab_size": 320, "moe": {"num_experts": 9, "experts_per_token": 1, "expert_width": 8}},
    ],
    "qwen3_moe": [
        {"attention": {"num_kv_heads": 4, "head_width": 12}},
        {"moe": {"normalize_top_k": False}, "tie_embeddings": True},
        {"attention": {"head_width": 32, "rope_theta": 77.0}, "dense_layers": [0, 2], "dense_width": 24},
        {"moe_every": 2, "dense_width": 56, "norm_eps": 1e-3},
        {"attention": {"bias": True, "num_kv_heads": 1}, "vocab_size": 320},
    ],
}


@pytest.mark.parametrize(
    ("family", "change"), [(family, change) for family, changes in EXPRESSIBLE.items() for change in changes]
)
def test_every_expressible_setting_reaches_transformers(tmp_path, tiny, family, change):
    values = tiny.changed(tiny.OLMOE if family == "olmoe" else tiny.QWEN3, change)
    run = tiny.write_run(tmp_path / "run", values, seed=3)
    export(run, tmp_path / "out", options=FOR_TRANSFORMERS)
    report = tiny.verified(run, tmp_path / "out")
    assert report["complaints"] == []
    assert report["logits"]["float32"]["max_logit"] > 1


@pytest.mark.parametrize("name", ["olmoe_all", "qwen3_moe_all"])
def test_transformers_reads_every_field_of_config_json_as_written(tmp_path, tiny, name):
    base, changes, _ = tiny.EXPORTS[name]
    run = tiny.write_run(tmp_path / "run", tiny.changed(base, changes))
    export(run, tmp_path / "out", options=FOR_TRANSFORMERS)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == base["attention"]["rope_theta"]
    assert written["num_experts"] == written["num_local_experts"] == base["moe"]["num_experts"]
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert written["router_aux_loss_coef"] == 0.01 / base["moe"]["experts_per_token"]
    read = AutoConfig.from_pretrained(tmp_path / "out")
    for key, value in written.items():
        if key == "rope_theta":
            assert read.rope_parameters[key] == value
        elif key in ("dtype", "torch_dtype"):
            assert read.dtype == getattr(torch, value)
        else:
            assert getattr(read, key) == value, key
    eos_id = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]["<|endoftext|>"]
    assert read.eos_token_id == eos_id
    assert read.pad_token_id is None
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == eos_id


def test_padded_rows_of_the_vocabulary_are_cut_off(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    export(run, tmp_path / "out", options=FILES_ONLY)
    ours, theirs = tiny.weights_of(run), tiny.exported_tensors(tmp_path / "out")
    assert ours["embed.weight"].shape[0] == 352
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 320
    assert torch.equal(theirs["model.embed_tokens.weight"], ours["embed.weight"][:320])
    assert torch.equal(theirs["lm_head.weight"], ours["lm_head.weight"][:320])


def test_tensors_are_written_once_under_per_expert_names(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    export(run, tmp_path / "out", options=FILES_ONLY)
    ours, theirs = tiny.weights_of(run), tiny.exported_tensors(tmp_path / "out")
    gate_up = ours["blocks.1.moe.w_gate_up"]
    for expert in range(6):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(theirs[f"{prefix}.gate_proj.weight"], gate_up[expert, :16])
        assert torch.equal(theirs[f"{prefix}.up_proj.weight"], gate_up[expert, 16:])
        assert torch.equal(theirs[f"{prefix}.down_proj.weight"], ours["blocks.1.moe.w_down"][expert])
    attention = model_config(tiny.OLMOE).attention
    assert set(theirs) == {hf_name for name, tensor in ours.items() for hf_name, _ in to_hf(name, tensor, attention)}
    assert not any("gate_up_proj" in name for name in theirs)


def test_a_tied_head_is_left_out(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.changed(tiny.QWEN3, {"tie_embeddings": True}))
    export(run, tmp_path / "out", options=FOR_TRANSFORMERS)
    assert "lm_head.weight" not in tiny.exported_tensors(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_untied_copy_of_a_tied_head_serves_every_server(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.changed(tiny.OLMOE, {"tie_embeddings": True}))
    with pytest.raises(ValueError, match=r"model\.tie_embeddings=True"):
        export(run, tmp_path / "out", options=FILES_ONLY)
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "out", options=ExportOptions(compare_logits=False, untie_head=True))
    theirs = tiny.exported_tensors(tmp_path / "out")
    assert torch.equal(theirs["lm_head.weight"], theirs["model.embed_tokens.weight"])
    assert tiny.verified(run, tmp_path / "out")["complaints"] == []


def test_shards_stay_below_their_size_and_the_index_names_every_tensor(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    export(run, tmp_path / "whole", options=FILES_ONLY)
    export(run, tmp_path / "out", options=ExportOptions(compare_logits=False, shard_bytes=65_000))
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert [path.name for path in shards] == [
        f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for path in shards:
        tensors = load_file(path)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 65_000 or len(tensors) == 1
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(tensors)
        total += size
    assert index["metadata"]["total_size"] == total
    whole = tiny.exported_tensors(tmp_path / "whole")
    assert all(torch.equal(whole[name], tensor) for name, tensor in tiny.exported_tensors(tmp_path / "out").items())
    assert tiny.verified(run, tmp_path / "out")["complaints"] == []


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
def test_narrow_exports_hold_the_rounded_weights(tmp_path, tiny, dtype_name):
    run = tiny.write_run(tmp_path / "run", tiny.QWEN3)
    export(run, tmp_path / "out", options=ExportOptions(compare_logits=False, dtype_name=dtype_name))
    dtype = getattr(torch, dtype_name)
    ours, theirs = tiny.weights_of(run), tiny.exported_tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in theirs.values()} == {dtype}
    assert torch.equal(theirs["model.layers.2.mlp.gate.weight"], ours["blocks.2.moe.router.weight"].to(dtype))
    report = tiny.verified(run, tmp_path / "out", dtype)
    assert report["complaints"] == []
    assert set(report["logits"]) == {"float32", dtype_name}


def run_with_weight(tmp_path: Path, tiny, name: str, value: float) -> Path:
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    weights = tiny.weights_of(run)
    weights[name].view(-1)[5] = value
    saved = open_saved_run(run)
    save_weights(run / "checkpoints", weights=weights, state=saved.state, config={})
    return run


def test_a_weight_that_overflows_the_dtype_is_refused_by_name(tmp_path, tiny):
    run = run_with_weight(tmp_path, tiny, "blocks.1.moe.w_down", 7e4)
    with pytest.raises(ValueError, match=r"blocks\.1\.moe\.w_down .*7e\+04, which overflows torch\.float16"):
        export(run, tmp_path / "out", options=ExportOptions(compare_logits=False, dtype_name="float16"))
    export(run, tmp_path / "out", options=ExportOptions(compare_logits=False, dtype_name="bfloat16"))


def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path, tiny):
    run = run_with_weight(tmp_path, tiny, "blocks.0.attention.k_norm.weight", float("nan"))
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.k_norm\.weight .*NaN or infinity"):
        export(run, tmp_path / "out", options=FILES_ONLY)
    assert not (tmp_path / "out").exists()


def test_only_an_empty_place_is_written_to(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        export(run, tmp_path / "out", options=FILES_ONLY)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an export that was cut off"):
        export(run, tmp_path / "new", options=FILES_ONLY)
    assert (tmp_path / "out" / "thesis.txt").read_text() == (tmp_path / "new.partial" / "thesis.txt").read_text()


KILLED = """
import os, signal, sys
from pathlib import Path
from checkpoint import export_hf

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

export_hf._compare = die
export_hf.export(Path(sys.argv[1]), Path(sys.argv[2]), options=export_hf.ExportOptions())
"""


def test_a_killed_export_leaves_nothing_that_looks_complete(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    out = tmp_path / "out"
    finished = subprocess.run(
        [sys.executable, "-c", KILLED, str(run), str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    assert not out.exists()
    assert (tmp_path / "out.partial" / UNFINISHED).is_file()
    assert not (tmp_path / "out.partial" / RECEIPT).exists()
    export(run, out, options=FILES_ONLY)
    assert (out / RECEIPT).is_file()
    assert not (out / UNFINISHED).exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_run_that_lacks_something_is_refused_with_its_name(tmp_path, tiny):
    with pytest.raises(ValueError, match=r"is not a run: it has no config\.yaml"):
        export(tmp_path, tmp_path / "out", options=FILES_ONLY)
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    with pytest.raises(ValueError, match=r"no checkpoint .*step_00000099"):
        export(run, tmp_path / "out", step=99, options=FILES_ONLY)
    edited = (run / "config.yaml").read_text().replace("vocab_size: 352", "vocab_size: 310")
    (run / "config.yaml").write_text(edited)
    with pytest.raises(ValueError, match=r"320 tokens, but model\.vocab_size=310"):
        export(run, tmp_path / "out", options=FILES_ONLY)
    (run / "config.yaml").write_text(edited.replace("vocab_size: 310", "vocab_size: 400"))
    with pytest.raises(ValueError, match=r"2 tensors differ, first embed\.weight .*\(400, 48\).*\(352, 48\)"):
        export(run, tmp_path / "out", options=FILES_ONLY)
    (run / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        export(run, tmp_path / "out", options=FILES_ONLY)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path, tiny, capsys):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    (tmp_path / "file").touch()
    assert export_hf.main([str(run), str(tmp_path / "file" / "out"), "--no-compare"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(tmp_path / "file") in error


@pytest.mark.parametrize("num_bytes", [1000, 100_000])
def test_an_export_without_room_is_told_in_one_line(tmp_path, tiny, capsys, num_bytes):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        assert export_hf.main([str(run), str(tmp_path / "out"), "--no-compare"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_written_by_transformers_5_is_renamed_for_transformers_4(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE)
    tiny.edit_json(run / "tokenizer" / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    export(run, tmp_path / "out", options=FILES_ONLY)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["eos_token"] == "<|endoftext|>"


def test_the_command_reports_errors_in_one_line(tmp_path, tiny, capsys):
    run = tiny.write_run(tmp_path / "run", tiny.changed(tiny.QWEN3, {"attention": {"bias": True}}))
    assert export_hf.main([str(run), str(tmp_path / "out")]) == 1
    assert "model.attention.bias=True: Qwen3MoeForCausalLM in vllm" in capsys.readouterr().err
    assert export_hf.main([str(run), str(tmp_path / "out"), "--serve", "sglang", "--no-compare", "--step", "7"]) == 0
    assert "exported step 7 of run" in capsys.readouterr().out
    receipt = json.loads((tmp_path / "out" / RECEIPT).read_text())
    assert receipt["served"] == ["transformers", Reader.sglang.value]
    assert receipt["reload"] == "not compared: --no-compare was given"


def test_sizes_are_read_with_their_units():
    assert size_in_bytes("4GB") == 4_000_000_000
    assert size_in_bytes("500 mb") == 500_000_000
    assert size_in_bytes("12") == 12
    for wrong in ("4TB", "x", "0", "-3MB", ""):
        with pytest.raises(Exception, match="is not a size"):
            size_in_bytes(wrong)
