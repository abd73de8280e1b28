"""config.json and generation_config.json of an export, and ModelConfig from a config.json.

Both spellings of what transformers 4 and 5 name differently are written: a file in only one of them loads in the
other with a wrong rope theta or a wrong number of experts. What cannot be expressed at all is in hf_rules.py.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from checkpoint.hf_rules import CLASS_NAMES, Family
from model.config import AttentionConfig, ModelConfig, MoEConfig, QKNorm

_ALLOWED = {"hidden_act": ("silu",), "use_sliding_window": (False, None), "quantization_config": (None,)}
_SPELLINGS = (("num_experts", "num_local_experts"), ("dtype", "torch_dtype"))


def to_hf_config(
    config: ModelConfig,
    *,
    family: Family,
    dtype: torch.dtype,
    eos_id: int,
    load_balance_weight: float | None,
) -> dict[str, Any]:
    """Return the config.json of ``config`` as a model of ``family``; hf_rules.py says whether it can express it.

    ``config.vocab_size`` is the tokenizer's by now. ``load_balance_weight`` is ours, on a loss of 1 when balanced;
    transformers' coefficient is for one of K, so it is divided by K. None leaves the class's default.
    """
    moe, attention = config.moe, config.attention
    dtype_name = str(dtype).removeprefix("torch.")
    values: dict[str, Any] = {
        "architectures": [CLASS_NAMES[family]],
        "model_type": family.value,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": attention.bias,
        "attention_dropout": 0.0,
        "rope_theta": attention.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_theta},
        "num_experts": moe.num_experts,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "norm_topk_prob": moe.normalize_top_k,
        "output_router_logits": False,
        "use_cache": True,
        # Null, not left out: OlmoeConfig's own defaults are ids of another vocabulary, and a padding id would keep
        # that token's embedding from being trained.
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": None,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }
    if load_balance_weight is not None:
        values["router_aux_loss_coef"] = load_balance_weight / moe.experts_per_token
    if family is Family.olmoe:
        return values | {"intermediate_size": moe.expert_width, "clip_qkv": attention.clip_qkv}
    return values | {
        "head_dim": attention.head_width,
        "moe_intermediate_size": moe.expert_width,
        # The width of dense layers; where there are none nobody reads it, and that of K experts is the usual value.
        "intermediate_size": config.dense_width or moe.expert_width * moe.experts_per_token,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": config.moe_every,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def generation_config(eos_id: int) -> dict[str, Any]:
    """Return the generation_config.json of an export: stop at the end-of-text token, and pad batches with it."""
    return {"eos_token_id": eos_id, "pad_token_id": eos_id}


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return ``folder``'s config.json in one spelling, with the class's defaults for what it leaves out.

    Raises: ValueError for a model type that is neither family's, two spellings that disagree, or a setting that
    changes the function and that we do not have.
    """
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = [family.value for family in Family]
    if written.get("model_type") not in known:
        raise ValueError(f"{folder}/config.json: model_type={written.get('model_type')!r} is not one of {known}")
    for one, other in _SPELLINGS:
        if one in written and other in written and written[one] != written[other]:
            raise ValueError(f"{folder}/config.json: {one}={written[one]} and {other}={written[other]} disagree")
    # Its classes know what it means when a file leaves a key out.
    values: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    values["num_experts"] = values.get("num_experts", values.get("num_local_experts"))
    rope = values["rope_parameters"]
    if "rope_theta" in written and written["rope_theta"] != rope["rope_theta"]:
        raise ValueError(
            f"{folder}/config.json: rope_theta={written['rope_theta']} and rope_parameters={rope} disagree"
        )
    for key, allowed in _ALLOWED.items():
        if values.get(key) not in allowed:
            raise ValueError(f"{folder}/config.json: {key}={values[key]!r}, but our decoder only has {allowed[0]!r}")
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{folder}/config.json: rope_parameters={rope}, but our rotary embedding is the plain one")
    return values


def from_hf_config(folder: Path) -> ModelConfig:
    """Return the ModelConfig that a folder's config.json describes; how it is routed in training stays the default.

    Raises: ValueError where our decoder cannot be that model.
    """
    values = read_hf_config(folder)
    is_olmoe = values["model_type"] == Family.olmoe.value
    heads = values["num_attention_heads"]
    dense_layers = [] if is_olmoe else list(values["mlp_only_layers"])
    moe_every = 1 if is_olmoe else values["decoder_sparse_step"]
    return ModelConfig(
        vocab_size=values["vocab_size"],
        width=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=values["num_key_value_heads"],
            head_width=values.get("head_dim") or values["hidden_size"] // heads,
            qk_norm=QKNorm.full_width if is_olmoe else QKNorm.per_head,
            rope_theta=values["rope_parameters"]["rope_theta"],
            bias=values["attention_bias"],
            clip_qkv=values["clip_qkv"] if is_olmoe else None,
        ),
        moe=MoEConfig(
            num_experts=values["num_experts"],
            experts_per_token=values["num_experts_per_tok"],
            expert_width=values["intermediate_size" if is_olmoe else "moe_intermediate_size"],
            normalize_top_k=values["norm_topk_prob"],
        ),
        max_positions=values["max_position_embeddings"],
        norm_eps=values["rms_norm_eps"],
        tie_embeddings=values["tie_word_embeddings"],
        init_std=values["initializer_range"],
        dense_layers=dense_layers,
        moe_every=moe_every,
        # Without a dense layer the file's value means nothing.
        dense_width=values["intermediate_size"] if dense_layers or moe_every > 1 else None,
    )
