"""Tiles of the weight gradients that compile and run beside the rule's: other orders of units, other epilogues."""

from dataclasses import replace

from moe_kernels.cute.tiles import KernelForm, TileConfig, rule_for

WEIGHT_GRADS = [form for form in KernelForm if form.is_weight_grad]
SCHEDULES = ("by number", "a tile stored at once")


def weight_grad_tile(form: KernelForm, schedule: str) -> TileConfig:
    """Return the tile of ``form`` with ``schedule``, one of SCHEDULES."""
    rule = rule_for(form, 1024, 1024)
    sub_tiles = rule.columns // rule.store_columns
    changes: dict[str, dict] = {
        "by number": {"claims_units": False},
        "a tile stored at once": {"stages": 3, "store_sets": sub_tiles // (2 if form.accumulates else 1)},
    }
    return replace(rule, **changes[schedule])
