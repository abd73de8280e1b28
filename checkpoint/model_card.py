"""The README.md of an export, filled from the run. Numbers that a reader may want to check are in the receipt."""

from checkpoint.hf_rules import CLASS_NAMES, Family, Verdict
from checkpoint.saved_run import SavedRun
from model.config import ModelConfig
from model.counting import count_parameters
from moe_kernels import RoutingKind


def model_card(
    run: SavedRun, config: ModelConfig, *, family: Family, dtype_name: str, unserved: list[Verdict], compared: bool
) -> str:
    """Return the model card of an export in Markdown, with the YAML header that the Hub reads.

    ``config`` is the exported model's; ``unserved`` are broken rules of servers; ``compared`` says whether logits were
    compared with transformers.
    """
    check = (
        "Reloaded with `transformers` in a process of its own, and compared with the training code's logits: "
        "`gristmill_receipt.json` has the errors, versions and checksums."
        if compared
        else "**Not compared with `transformers`**: `python -m checkpoint.verify_hf` of Gristmill does it."
    )
    limits = "".join(f"- {verdict}\n" for verdict in unserved) or "None known.\n"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, {family.value}, gristmill]
---

# {run.path.resolve().name}

A Mixture-of-Experts language model pretrained with Gristmill and written as `{CLASS_NAMES[family]}` in {dtype_name}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")
model = AutoModelForCausalLM.from_pretrained("path/of/this/folder")
```

| shape | |
|---|---|
{_shape_rows(config)}
| training | |
|---|---|
| optimiser steps | {run.state.step:,} |
| tokens | {run.state.tokens:,} |
| routing in training | {_routing(config)} |
{_loss_rows(run)}
The exported model routes every token to its top {config.moe.experts_per_token} experts, as in evaluation; the training
routing is not part of it. This is a base model: it continues text and was not taught to follow instructions.
{_documents_note(run)}
{check}

## Servers

Where other software computes something else from these files:

{limits}"""


_LOSSES = {
    "eval/held_out/ce_top_k": "held-out loss, top-K (nats per token)",
    "eval/held_out/ce_train_routing": "held-out loss, training routing (nats per token)",
}


def _documents_note(run: SavedRun) -> str:
    # An import has no section `data`: it knows nothing of its training.
    if not run.values.get("data", {}).get("mask_documents", False):
        return ""
    return (
        "\nIn training, attention stayed inside documents (`data.mask_documents`). This model does not mask documents\n"
        "by itself: give it one document in each sequence.\n"
    )


def _loss_rows(run: SavedRun) -> str:
    # A run is not evaluated at every step that it saves, so the step is told.
    losses = run.held_out_losses()
    if losses is None:
        return ""
    return "".join(
        f"| {name}, step {losses.step:,} | {losses.values[key]:.4f} |\n"
        for key, name in _LOSSES.items()
        if key in losses.values
    )


def _shape_rows(config: ModelConfig) -> str:
    count = count_parameters(config)
    moe = config.moe
    rows = {
        "parameters": f"{count.total:,}, of which {count.active:,} are active for a token",
        "layers": f"{config.num_layers}, width {config.width}",
        "experts": f"{moe.num_experts} of width {moe.expert_width}, {moe.experts_per_token} for each token",
        "attention": f"{config.attention.num_heads} query and {config.attention.num_kv_heads} key/value heads "
        f"of width {config.attention.head_width}",
        "vocabulary": f"{config.vocab_size:,}",
        "positions": f"{config.max_positions:,}",
    }
    return "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def _routing(config: ModelConfig) -> str:
    routing = config.moe.routing
    if routing.train is not RoutingKind.token_rounding:
        return routing.train.name
    return f"{routing.train.name} ({routing.rounding.name}, tiles of {routing.tile_m})"
