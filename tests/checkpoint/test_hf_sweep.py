"""Random models over the cross product of settings: transformers' export computes ours, or the setting is refused.

Chosen combinations are in test_export_hf.py and tests/model/test_hf_parity.py; these are drawn, with seeds.
"""

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from checkpoint.export_hf import ExportOptions, export
from checkpoint.hf_rules import Family, Reader, check_rules
from checkpoint.hf_weights import meta_decoder
from checkpoint.import_hf import import_hf
from checkpoint.saved_run import model_config, open_saved_run
from checkpoint.store import load_weights
from tests.model.tiny_models import hf_names, in_our_layout, relative_difference

NUM_DRAWS, NUM_SLOW_DRAWS = 24, 240
VOCAB = 320  # of the tokenizer
FOR_TRANSFORMERS = ExportOptions(compare_logits=False, serve=())
# fp32 has eps 1.2e-7; sums over some hundred terms in another order differ by some ten of them.
TOLERANCE = 1e-5

# An axis that matters to one family alone has one value for the other. Every value comes equally often.
AXES = {
    "family": ["olmoe", "qwen3_moe"],
    "groups": ["one", "some", "all"],  # key/value heads: 1, H/2, H
    "tied": [False, True],
    "normalized": [False, True],
    "head_width": ["narrow", "divided", "wide"],  # against width / heads
    "theta": [50.0, 1e4, 1e6],
    "dense": ["none", "listed", "every_second", "both"],
    "padding": [0, 1, 32],
    "bias": [False, True],
    "clip": [None, 0.5],
    "eps": [1e-6, 1e-5, 1e-2],
    "experts": [(3, 2), (4, 3), (6, 2), (8, 8)],
}
EXPRESSED_BY_ONE = {
    "olmoe": {"head_width": ["divided"], "dense": ["none"]},
    "qwen3_moe": {"clip": [None]},
}


def draws(seed: int, number: int) -> list[dict]:
    """Return ``number`` random settings, half of them of each family, that this family's class expresses."""
    rng = random.Random(seed)
    settings = []
    for family in AXES["family"]:
        columns = {}
        for axis, values in (AXES | {"family": [family]} | EXPRESSED_BY_ONE[family]).items():
            column = [values[index % len(values)] for index in range(number // 2)]
            rng.shuffle(column)
            columns[axis] = column
        settings += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return settings


def any_draws(seed: int, number: int) -> list[dict]:
    """Return random settings of the whole cross product, whether a class expresses them or not."""
    rng = random.Random(seed)
    return [{axis: rng.choice(values) for axis, values in AXES.items()} for _ in range(number)]


def values_of(setting: dict) -> dict:
    """Return the section ``model`` of config.yaml."""
    width, heads = 48, 4
    num_experts, experts_per_token = setting["experts"]
    return {
        "vocab_size": VOCAB + setting["padding"],
        "width": width,
        "num_layers": 4,
        "max_positions": 64,
        "norm_eps": setting["eps"],
        "tie_embeddings": setting["tied"],
        "attention": {
            "num_heads": heads,
            "num_kv_heads": {"one": 1, "some": heads // 2, "all": heads}[setting["groups"]],
            "head_width": {"narrow": 6, "divided": width // heads, "wide": 20}[setting["head_width"]],
            "qk_norm": "full_width" if setting["family"] == "olmoe" else "per_head",
            "rope_theta": setting["theta"],
            "bias": setting["bias"],
            "clip_qkv": setting["clip"],
        },
        "moe": {
            "num_experts": num_experts,
            "experts_per_token": experts_per_token,
            "expert_width": 16,
            "normalize_top_k": setting["normalized"],
        },
        "dense_layers": [0] if setting["dense"] in ("listed", "both") else [],
        "moe_every": 2 if setting["dense"] in ("every_second", "both") else 1,
        "dense_width": None if setting["dense"] == "none" else 24,
    }


def name_of(setting: dict) -> str:
    return "-".join(str(value).replace(" ", "") for value in setting.values())


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "tokenizer"
    tiny.write_tokenizer(folder, VOCAB)
    return folder


def write_run(tiny, folder: Path, tokenizer: Path, setting: dict, seed: int = 0) -> Path:
    shutil.copytree(tokenizer, folder / "tokenizer")
    return tiny.write_run(folder, values_of(setting), seed=seed)


def loss_of(logits_BSV: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())


def assert_transformers_computes_the_export_alike(tiny, tmp_path: Path, tokenizer: Path, setting: dict) -> None:
    run = open_saved_run(write_run(tiny, tmp_path / "run", tokenizer, setting))
    export(run.path, tmp_path / "out", options=FOR_TRANSFORMERS)
    decoder = meta_decoder(run.config).to_empty(device="cpu")
    load_weights(run.checkpoint, decoder)
    twin, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    assert type(twin).__name__ == {"olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[setting["family"]]

    ids_BS = torch.randint(VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    logits_BSV = decoder(ids_BS).logits_BSV[..., :VOCAB]
    expected_BSV = twin(input_ids=ids_BS).logits
    assert expected_BSV.shape == logits_BSV.shape
    assert expected_BSV.abs().max() > 1, "logits near zero would agree with anything"
    assert relative_difference(logits_BSV, expected_BSV) <= TOLERANCE

    loss_of(logits_BSV, ids_BS).backward()
    loss_of(expected_BSV, ids_BS).backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    ours = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    assert {hf_name for name in ours for hf_name in hf_names(name)} == set(expected)
    far = {}
    for name, grad in ours.items():
        kept, theirs = (
            grad[:VOCAB] if name in ("embed.weight", "lm_head.weight") else grad,
            in_our_layout(expected, name),
        )
        if relative_difference(kept, theirs) > TOLERANCE:
            far[name] = kept, theirs
    if far:  # a gradient that nearly cancels, where both err by about as much: ours may not err twice as much
        exact = decoder.double()
        exact.zero_grad()
        loss_of(exact(ids_BS).logits_BSV[..., :VOCAB], ids_BS).backward()
        for name, (kept, theirs) in far.items():
            truth = exact.get_parameter(name).grad[: len(kept)]
            assert relative_difference(kept, truth) <= 2 * relative_difference(theirs, truth), name

    config, weights = import_hf(tmp_path / "out")
    assert config == model_config(values_of(setting | {"padding": 0}))
    for name, weight in tiny.weights_of(run.path).items():
        assert torch.equal(weights[name], weight[:VOCAB] if name in ("embed.weight", "lm_head.weight") else weight)


@pytest.mark.parametrize("setting", draws(0, NUM_DRAWS), ids=name_of)
def test_a_random_model_is_the_same_function_in_transformers(tiny, tmp_path, tokenizer, setting):
    assert_transformers_computes_the_export_alike(tiny, tmp_path, tokenizer, setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", draws(1, NUM_SLOW_DRAWS), ids=name_of)
def test_many_random_models_are_the_same_functions_in_transformers(tiny, tmp_path, tokenizer, setting):
    assert_transformers_computes_the_export_alike(tiny, tmp_path, tokenizer, setting)


def test_the_draws_meet_every_value_of_every_axis():
    for family, fixed in EXPRESSED_BY_ONE.items():
        of_family = [setting for setting in draws(0, NUM_DRAWS) if setting["family"] == family]
        for axis, values in (AXES | {"family": [family]} | fixed).items():
            assert {setting[axis] for setting in of_family} == set(values), (family, axis)


def inexpressible_fields(setting: dict) -> set[str]:
    """Return the fields that the family's class has no place for, without asking the rules."""
    if setting["family"] == "qwen3_moe":
        return {"model.attention.clip_qkv"} if setting["clip"] is not None else set()
    fields = {"model.attention.head_width"} if setting["head_width"] != "divided" else set()
    if setting["dense"] in ("listed", "both"):
        fields.add("model.dense_layers")
    if setting["dense"] in ("every_second", "both"):
        fields.add("model.moe_every")
    return fields


def test_what_a_class_cannot_express_is_found_in_every_combination():
    settings = any_draws(2, 100)
    refused = 0
    for setting in settings:
        verdicts = check_rules(model_config(values_of(setting)), Family(setting["family"]))
        broken = {v.rule.field for v in verdicts if not v.holds and v.reader is Reader.transformers}
        assert broken == inexpressible_fields(setting), setting
        refused += bool(broken)
    assert 20 < refused < 80


@pytest.mark.parametrize("setting", [s for s in any_draws(3, 20) if inexpressible_fields(s)][:6], ids=name_of)
def test_an_export_of_what_a_class_cannot_express_is_refused_with_every_field(tiny, tmp_path, tokenizer, setting):
    run = write_run(tiny, tmp_path / "run", tokenizer, setting)
    with pytest.raises(ValueError, match="this model cannot be exported") as refusal:
        export(run, tmp_path / "out", options=FOR_TRANSFORMERS)
    for field in inexpressible_fields(setting):
        assert f"- {field}=" in str(refusal.value)
    assert not (tmp_path / "out").exists()
