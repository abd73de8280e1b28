"""The rule table: every setting that a class or a server cannot express is refused with its field."""

from pathlib import Path

import pytest

from checkpoint.hf_rules import RULES, SERVERS, Family, Reader, check_rules, default_family, refuse_broken
from checkpoint.saved_run import model_config

# (family, field, a change that breaks the rule, readers that have it)
BREAKS = [
    ("olmoe", "model.attention.qk_norm", {"attention": {"qk_norm": "per_head"}}, "t"),
    ("olmoe", "model.attention.head_width", {"attention": {"head_width": 16}}, "t"),
    ("olmoe", "model.dense_layers", {"dense_layers": [0], "dense_width": 24}, "t"),
    ("olmoe", "model.moe_every", {"moe_every": 2, "dense_width": 24}, "t"),
    ("olmoe", "model.moe.router", {"moe": {"router": "sigmoid"}}, "t"),
    ("olmoe", "model.moe.routed_scale", {"moe": {"routed_scale": 2.5}}, "t"),
    ("olmoe", "model.moe.normalize_top_k", {"moe": {"normalize_top_k": True}}, "vs"),
    ("olmoe", "model.norm_eps", {"norm_eps": 1e-6}, "vs"),
    ("olmoe", "model.attention.clip_qkv", {"attention": {"clip_qkv": 8.0}}, "vs"),
    ("olmoe", "model.attention.bias", {"attention": {"bias": True}}, "vs"),
    ("olmoe", "model.tie_embeddings", {"tie_embeddings": True}, "vs"),
    ("olmoe", "model.attention.num_kv_heads", {"attention": {"num_kv_heads": 2}}, "s"),
    ("qwen3_moe", "model.attention.qk_norm", {"attention": {"qk_norm": "full_width"}}, "t"),
    ("qwen3_moe", "model.attention.clip_qkv", {"attention": {"clip_qkv": 8.0}}, "t"),
    ("qwen3_moe", "model.moe.router", {"moe": {"router": "sigmoid"}}, "t"),
    ("qwen3_moe", "model.moe.routed_scale", {"moe": {"routed_scale": 2.5}}, "t"),
    ("qwen3_moe", "model.attention.bias", {"attention": {"bias": True}}, "v"),
    ("qwen3_moe", "model.dense_layers", {"dense_layers": [0], "dense_width": 24}, "s"),
    ("qwen3_moe", "model.moe_every", {"moe_every": 2, "dense_width": 24}, "s"),
    ("qwen3_moe", "model.tie_embeddings", {"tie_embeddings": True}, "s"),
]
READERS = {"t": Reader.transformers, "v": Reader.vllm, "s": Reader.sglang}


def base_of(tiny, family: str):
    return tiny.OLMOE if family == "olmoe" else tiny.QWEN3


def test_the_list_of_breaks_covers_every_rule():
    listed = {(family, field) for family, field, _, _ in BREAKS}
    assert listed == {(family.value, rule.field) for rule in RULES for family in rule.families}


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_a_model_like_the_released_ones_breaks_no_rule(tiny, family):
    verdicts = check_rules(model_config(base_of(tiny, family)), Family(family))
    assert verdicts
    assert all(verdict.holds for verdict in verdicts)
    assert refuse_broken(verdicts, serve=SERVERS) == []


@pytest.mark.parametrize(("family", "field", "change", "readers"), BREAKS)
def test_a_broken_rule_is_refused_with_its_field(tiny, family, field, change, readers):
    config = model_config(tiny.changed(base_of(tiny, family), change))
    verdicts = check_rules(config, Family(family))
    broken = [verdict for verdict in verdicts if not verdict.holds]
    assert [verdict.rule.field for verdict in broken] == [field] * len(readers)
    assert [verdict.reader for verdict in broken] == [READERS[letter] for letter in readers]
    with pytest.raises(ValueError, match=rf"- {field}=.* needs "):
        refuse_broken(verdicts, serve=SERVERS)
    if readers == "t":
        with pytest.raises(ValueError, match=rf"- {field}="):
            refuse_broken(verdicts, serve=())
    else:
        assert refuse_broken(verdicts, serve=()) == broken


def test_the_refusal_names_the_servers_that_could_be_served(tiny):
    grouped = model_config(tiny.changed(tiny.OLMOE, {"attention": {"num_kv_heads": 2}}))
    with pytest.raises(ValueError, match=r"pass --serve vllm$"):
        refuse_broken(check_rules(grouped, Family.olmoe), serve=SERVERS)
    normalised = model_config(tiny.changed(tiny.OLMOE, {"moe": {"normalize_top_k": True}}))
    with pytest.raises(ValueError, match=r"pass --serve$"):
        refuse_broken(check_rules(normalised, Family.olmoe), serve=SERVERS)


def test_the_documentation_lists_every_rule():
    text = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    for rule in RULES:
        families = ", ".join(family.value for family in rule.families)
        readers = ", ".join(reader.value for reader in rule.readers)
        assert f"| {families} | {readers} | `{rule.field}` | {rule.needs} | {rule.otherwise} |" in text, rule.field


def test_the_family_follows_from_the_qk_norm(tiny):
    assert default_family(model_config(tiny.OLMOE)) is Family.olmoe
    assert default_family(model_config(tiny.QWEN3)) is Family.qwen3_moe
    with pytest.raises(ValueError, match=r"model\.attention\.qk_norm=none"):
        default_family(model_config(tiny.changed(tiny.OLMOE, {"attention": {"qk_norm": "none"}})))
