"""What each target can express: one table of rules, each naming the config field that it is about.

A rule of transformers itself is always enforced: the class has no place for anything else. A rule of a server
(vLLM, SGLang) speaks of an export that loads there and computes something else; ``--serve`` says which must hold.
Source: transformers 5.24 and 4.57.6, models/{olmoe,qwen3_moe}; vLLM, model_executor/models/{olmoe,qwen3_moe}.py;
SGLang, srt/models/{olmoe,qwen3_moe}.py (all read in 2026).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from model.config import ModelConfig, QKNorm, RouterKind


class Family(Enum):
    """The class of transformers that an export is written for."""

    olmoe = "olmoe"
    qwen3_moe = "qwen3_moe"


class Reader(Enum):
    """Software that reads an export."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"


CLASS_NAMES = {Family.olmoe: "OlmoeForCausalLM", Family.qwen3_moe: "Qwen3MoeForCausalLM"}
SERVERS = (Reader.vllm, Reader.sglang)


@dataclass(frozen=True)
class Rule:
    """One thing that some readers assume of a model of some family."""

    families: tuple[Family, ...]
    readers: tuple[Reader, ...]
    field: str  # dotted name in config.yaml
    needs: str
    otherwise: str  # what goes wrong where the rule is broken, or what to do about it
    holds: Callable[[ModelConfig], bool]


@dataclass(frozen=True)
class Verdict:
    """One rule applied to one model, for one reader."""

    rule: Rule
    family: Family
    reader: Reader
    value: Any
    holds: bool

    def __str__(self) -> str:
        rule = self.rule
        return (
            f"{rule.field}={self.value}: {CLASS_NAMES[self.family]} in {self.reader.value} needs {rule.needs}; "
            f"{rule.otherwise}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values, for the receipt."""
        rule = self.rule
        return {"reader": self.reader.value, "field": rule.field, "value": self.value, "needs": rule.needs} | (
            {"holds": True} if self.holds else {"holds": False, "otherwise": rule.otherwise}
        )


_OLMOE = (Family.olmoe,)
_QWEN3 = (Family.qwen3_moe,)
_BOTH = (Family.olmoe, Family.qwen3_moe)
_TRANSFORMERS = (Reader.transformers,)
_NO_CLASS_SIGMOID = (
    "sigmoid routers with a balancing bias fit classes like DeepseekV3ForCausalLM, which are not written"
)
_NO_CLASS_SCALE = (
    "only classes like DeepseekV3ForCausalLM have a factor on the routed experts, and they are not written"
)

RULES = (
    Rule(
        _OLMOE,
        _TRANSFORMERS,
        "model.attention.qk_norm",
        "full_width",
        "per_head fits --family qwen3_moe; none fits neither class",
        lambda config: config.attention.qk_norm is QKNorm.full_width,
    ),
    Rule(
        _OLMOE,
        _TRANSFORMERS,
        "model.attention.head_width",
        "exactly model.width / model.attention.num_heads",
        "only Qwen3MoeForCausalLM (with qk_norm=per_head) has a head width of its own",
        lambda config: config.attention.head_width * config.attention.num_heads == config.width,
    ),
    Rule(
        _OLMOE,
        _TRANSFORMERS,
        "model.dense_layers",
        "an empty list",
        "only Qwen3MoeForCausalLM (with qk_norm=per_head) has dense layers",
        lambda config: not config.dense_layers,
    ),
    Rule(
        _OLMOE,
        _TRANSFORMERS,
        "model.moe_every",
        "1",
        "only Qwen3MoeForCausalLM (with qk_norm=per_head) has dense layers",
        lambda config: config.moe_every == 1,
    ),
    Rule(
        _BOTH,
        _TRANSFORMERS,
        "model.moe.router",
        "softmax",
        _NO_CLASS_SIGMOID,
        lambda config: config.moe.router is RouterKind.softmax,
    ),
    Rule(
        _BOTH,
        _TRANSFORMERS,
        "model.moe.routed_scale",
        "1.0",
        _NO_CLASS_SCALE,
        lambda config: config.moe.routed_scale == 1.0,
    ),
    Rule(
        _OLMOE,
        SERVERS,
        "model.moe.normalize_top_k",
        "false",
        "it never divides by the top-K mass, so every expert output would be too small",
        lambda config: not config.moe.normalize_top_k,
    ),
    Rule(
        _OLMOE,
        SERVERS,
        "model.norm_eps",
        "1e-05",
        "it has that epsilon built in and does not read rms_norm_eps",
        lambda config: config.norm_eps == 1e-5,
    ),
    Rule(
        _OLMOE,
        SERVERS,
        "model.attention.clip_qkv",
        "null",
        "it does not clip queries, keys and values",
        lambda config: config.attention.clip_qkv is None,
    ),
    Rule(
        _OLMOE,
        SERVERS,
        "model.attention.bias",
        "false",
        "its projections have no bias and the saved ones are skipped",
        lambda config: not config.attention.bias,
    ),
    Rule(
        _OLMOE,
        SERVERS,
        "model.tie_embeddings",
        "false",
        "its head is never tied and would keep arbitrary values",
        lambda config: not config.tie_embeddings,
    ),
    Rule(
        _OLMOE,
        (Reader.sglang,),
        "model.attention.num_kv_heads",
        "model.attention.num_heads (no grouped queries)",
        "its key norm is as wide as the model",
        lambda config: config.attention.num_kv_heads == config.attention.num_heads,
    ),
    Rule(
        _QWEN3,
        _TRANSFORMERS,
        "model.attention.qk_norm",
        "per_head",
        "full_width fits --family olmoe; none fits neither class",
        lambda config: config.attention.qk_norm is QKNorm.per_head,
    ),
    Rule(
        _QWEN3,
        _TRANSFORMERS,
        "model.attention.clip_qkv",
        "null",
        "only OlmoeForCausalLM (with qk_norm=full_width) clips",
        lambda config: config.attention.clip_qkv is None,
    ),
    Rule(
        _QWEN3,
        (Reader.vllm,),
        "model.attention.bias",
        "false",
        "its output projection has no bias and the saved one is skipped",
        lambda config: not config.attention.bias,
    ),
    Rule(
        _QWEN3,
        (Reader.sglang,),
        "model.dense_layers",
        "an empty list",
        "it builds experts in every layer",
        lambda config: not config.dense_layers,
    ),
    Rule(
        _QWEN3,
        (Reader.sglang,),
        "model.moe_every",
        "1",
        "it builds experts in every layer",
        lambda config: config.moe_every == 1,
    ),
    Rule(
        _QWEN3,
        (Reader.sglang,),
        "model.tie_embeddings",
        "false",
        "its head is never tied and would keep arbitrary values",
        lambda config: not config.tie_embeddings,
    ),
)


def default_family(config: ModelConfig) -> Family:
    """Return the family whose QK-norm is this model's.

    Raises: ValueError for a model without QK-norm, which neither family expresses.
    """
    if config.attention.qk_norm is QKNorm.none:
        raise ValueError(
            "model.attention.qk_norm=none: both classes that are written normalise queries and keys "
            "(full_width: OlmoeForCausalLM, per_head: Qwen3MoeForCausalLM)"
        )
    return Family.olmoe if config.attention.qk_norm is QKNorm.full_width else Family.qwen3_moe


def check_rules(config: ModelConfig, family: Family) -> list[Verdict]:
    """Apply every rule of ``family`` to a model, once for each reader."""
    return [
        Verdict(rule=rule, family=family, reader=reader, value=_value_of(config, rule.field), holds=rule.holds(config))
        for rule in RULES
        if family in rule.families
        for reader in rule.readers
    ]


def refuse_broken(verdicts: list[Verdict], *, serve: tuple[Reader, ...]) -> list[Verdict]:
    """Return the broken rules of servers that are not in ``serve``; transformers is always served.

    Raises: ValueError that lists every other broken rule with its field.
    """
    broken = [verdict for verdict in verdicts if not verdict.holds]
    needed = (Reader.transformers, *serve)
    fatal = [verdict for verdict in broken if verdict.reader in needed]
    if fatal:
        text = "this model cannot be exported:\n" + "\n".join(f"- {verdict}" for verdict in fatal)
        if all(verdict.reader is not Reader.transformers for verdict in fatal):
            names = " ".join(reader.value for reader in serve if all(v.reader is not reader for v in fatal))
            text += (
                f"\ntransformers computes it rightly: to export for that, pass --serve{' ' + names if names else ''}"
            )
        raise ValueError(text)
    return [verdict for verdict in broken if verdict.reader not in needed]


def _value_of(config: ModelConfig, field: str) -> Any:
    value: Any = config
    for name in field.split(".")[1:]:
        value = getattr(value, name)
    return value.name if isinstance(value, Enum) else value
