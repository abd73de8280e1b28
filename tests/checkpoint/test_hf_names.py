"""The table of names: one to one, whole, and inverted by itself."""

import pytest
import torch

from checkpoint.hf_names import from_hf, hf_sources, to_hf
from checkpoint.saved_run import model_config


@pytest.mark.parametrize("name", ["olmoe_all", "qwen3_moe_all", "olmoe", "qwen3_moe"])
def test_the_table_is_inverted_by_itself(tiny, name):
    base, changes, _ = tiny.EXPORTS[name]
    config = model_config(tiny.changed(base, changes))
    ours = tiny.random_decoder(config).state_dict()
    theirs: dict[str, torch.Tensor] = {}
    for our_name, tensor in ours.items():
        for hf_name, part in to_hf(our_name, tensor, config.attention):
            assert hf_name not in theirs
            theirs[hf_name] = part
    assert sum(part.numel() for part in theirs.values()) == sum(tensor.numel() for tensor in ours.values())
    for our_name, tensor in ours.items():
        sources = hf_sources(our_name, num_experts=config.moe.num_experts, available=theirs.keys())
        assert torch.equal(from_hf(our_name, sources, theirs.__getitem__), tensor), our_name


def test_fused_experts_are_preferred_where_they_are(tiny):
    fused = "model.layers.3.mlp.experts.gate_up_proj"
    assert hf_sources("blocks.3.moe.w_gate_up", num_experts=2, available={fused}) == [fused]
    assert hf_sources("blocks.3.moe.w_gate_up", num_experts=2, available=set()) == [
        f"model.layers.3.mlp.experts.{expert}.{part}_proj.weight" for expert in range(2) for part in ("gate", "up")
    ]
    whole = torch.randn(2, 4, 3)
    assert from_hf("blocks.3.moe.w_gate_up", [fused], {fused: whole}.__getitem__) is whole


@pytest.mark.parametrize("name", ["blocks.0.moe.router.expert_bias", "blocks.0.attention.sinks", "head.weight"])
def test_a_name_that_neither_family_has_is_refused(tiny, name):
    with pytest.raises(ValueError, match="has no place"):
        list(to_hf(name, torch.zeros(2), model_config(tiny.OLMOE).attention))
    with pytest.raises(ValueError, match="has no place"):
        hf_sources(name, num_experts=2, available=set())
