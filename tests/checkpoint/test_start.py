"""A run may start from weights that are there already, but only if they are those of its model and its tokens."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint.export_hf import ExportOptions, export
from checkpoint.hf_weights import meta_decoder
from checkpoint.import_hf import write_import
from checkpoint.saved_run import open_saved_run
from checkpoint.start import load_start
from model.config import ModelConfig, RoutingConfig
from model.decoder import Decoder
from moe_kernels import RoutingKind


@pytest.fixture(scope="module")
def imported(tmp_path_factory, tiny) -> Path:
    """An import of an export of a random Qwen3-MoE with nearly every setting off its default; only to be read."""
    folder = tmp_path_factory.mktemp("start")
    base, changes, _ = tiny.EXPORTS["qwen3_moe_all"]
    run = tiny.write_run(folder / "origin", tiny.changed(base, changes))
    export(run, folder / "hf", options=ExportOptions(compare_logits=False, serve=()))
    write_import(folder / "hf", folder / "imported")
    return folder / "imported"


def new_model(config: ModelConfig) -> Decoder:
    decoder = meta_decoder(config).to_empty(device="cpu")
    decoder.init_weights(1)
    return decoder


def start(source: Path, config: ModelConfig, tokenizer: Path) -> Decoder:
    decoder = new_model(config)
    load_start(source, model=decoder, config=config, tokenizer=tokenizer)
    return decoder


def test_a_model_that_starts_from_an_import_has_the_weights_it_came_from(tiny, imported):
    config = open_saved_run(imported).config
    decoder = new_model(config)
    checkpoint = load_start(imported, model=decoder, config=config, tokenizer=imported.parent / "origin" / "tokenizer")
    assert checkpoint == imported / "checkpoints" / "step_00000000"
    origin = tiny.weights_of(imported.parent / "origin")
    for name, weight in decoder.state_dict().items():
        expected = origin[name][: config.vocab_size] if name == "embed.weight" else origin[name]
        assert torch.equal(weight, expected), name
    ids_BS = torch.randint(config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    decoder(ids_BS, ids_BS.roll(-1, 1), routing=RoutingKind.top_k).ce_sum.backward()
    assert all(parameter.grad.any() for parameter in decoder.parameters())


def test_the_way_of_training_is_the_new_runs_own(imported):
    config = open_saved_run(imported).config
    changed = replace(
        config,
        init_std=0.5,
        max_positions=32,
        moe=replace(config.moe, routing=RoutingConfig(train=RoutingKind.top_k, tile_m=8)),
    )
    decoder = start(imported, changed, imported / "tokenizer")
    assert torch.equal(decoder.norm.weight, start(imported, config, imported / "tokenizer").norm.weight)


def test_a_run_gives_the_checkpoint_of_the_step_that_was_asked_for(tmp_path, tiny):
    run = tiny.write_run(tmp_path / "run", tiny.OLMOE, seed=1, step=4)
    tiny.write_run(run, tiny.OLMOE, seed=2, step=9)
    config = open_saved_run(run).config
    decoder = new_model(config)
    for step, chosen in ((4, 4), (9, 9), (None, 9)):
        path = load_start(run, model=decoder, config=config, tokenizer=run / "tokenizer", step=step)
        assert path == run / "checkpoints" / f"step_0000000{chosen}"
        assert torch.equal(decoder.embed.weight, tiny.random_decoder(config, 1 if chosen == 4 else 2).embed.weight)


@pytest.mark.parametrize(
    ("field", "section", "value"),
    [
        ("model.vocab_size", None, 352),
        ("model.norm_eps", None, 1e-5),
        ("model.tie_embeddings", None, False),
        ("model.dense_layers", None, [2]),
        ("model.attention.rope_theta", "attention", 10_000.0),
        ("model.attention.num_kv_heads", "attention", 4),
        ("model.attention.clip_qkv", "attention", 3.0),
        ("model.moe.normalize_top_k", "moe", True),
        ("model.moe.experts_per_token", "moe", 3),
        ("model.moe.routed_scale", "moe", 2.0),
    ],
)
def test_another_function_is_refused_with_its_field_and_changes_nothing(imported, field, section, value):
    config = open_saved_run(imported).config
    change = {field.split(".")[-1]: value}
    changed = replace(config, **({section: replace(getattr(config, section), **change)} if section else change))
    decoder = new_model(changed)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    with pytest.raises(ValueError, match=rf"not those of this run's model:\n- {field}=.*, but .* there$"):
        load_start(imported, model=decoder, config=changed, tokenizer=imported / "tokenizer")
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())


def test_tokens_that_mean_something_else_are_refused(tmp_path, tiny, imported):
    config = open_saved_run(imported).config
    tiny.write_tokenizer(tmp_path / "smaller", 300)
    with pytest.raises(ValueError, match=r"smaller has another vocabulary .* prepare the data with the tokenizer in"):
        start(imported, config, tmp_path / "smaller")
    tiny.write_tokenizer(tmp_path / "lowercase")
    tiny.edit_json(tmp_path / "lowercase" / "tokenizer.json", normalizer={"type": "Lowercase"})
    with pytest.raises(ValueError, match=r"lowercase has other ids for the same text"):
        start(imported, config, tmp_path / "lowercase")
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        start(imported, config, tmp_path / "absent")


def test_an_import_without_a_tokenizer_says_so(tmp_path, imported):
    config = open_saved_run(imported).config
    copy = shutil.copytree(imported, tmp_path / "copy")
    (copy / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"copy/tokenizer holds no tokenizer\.json"):
        start(copy, config, imported / "tokenizer")
