"""Where tokens went: sums over micro-batches of what the MoE layers report. How they are routed is in moe_kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.moe import MoEStats
from training.world import World


class ExpertLoad(NamedTuple):
    """Sums over the micro-batches of a step, one entry a MoE layer (L), without gradient."""

    top_k_count_LE: Tensor  # pairs chosen by top-K, before rounding
    num_tokens: int
    entropy_sum_L: Tensor
    z_sum_L: Tensor
    logit_max_L: Tensor
    pairs_added_L: Tensor
    pairs_dropped_L: Tensor
    tokens_without_expert_L: Tensor
    rows_L: Tensor
    tile_rows_L: Tensor  # rows of all tiles that hold at least one row

    @classmethod
    def of(cls, stats: MoEStats, *, num_tokens: int, tile_m: int) -> "ExpertLoad":
        """Return the load of one micro-batch of ``num_tokens`` from the decoder's stacked ``stats``."""
        rows_LE = stats.row_count_E
        return cls(
            top_k_count_LE=stats.top_k_count_BE.sum(-2),
            num_tokens=num_tokens,
            entropy_sum_L=stats.entropy_sum.detach(),
            z_sum_L=stats.z_sum.detach(),
            logit_max_L=stats.logit_max.detach(),
            pairs_added_L=stats.pairs_added,
            pairs_dropped_L=stats.pairs_dropped,
            tokens_without_expert_L=stats.tokens_without_expert,
            rows_L=rows_LE.sum(-1),
            tile_rows_L=((rows_LE + tile_m - 1) // tile_m * tile_m).sum(-1),
        )

    @classmethod
    def sum(cls, loads: Sequence["ExpertLoad"]) -> "ExpertLoad":
        """Return the load of several micro-batches together."""
        by_field = {name: [getattr(load, name) for load in loads] for name in cls._fields}
        num_tokens = sum(by_field.pop("num_tokens"))
        logit_max_L = torch.stack(by_field.pop("logit_max_L")).amax(0)
        sums = {name: torch.stack(values).sum(0) for name, values in by_field.items()}
        return cls(num_tokens=num_tokens, logit_max_L=logit_max_L, **sums)

    def over(self, world: World) -> "ExpertLoad":
        """Return the load of all processes together."""
        if world.size == 1:
            return self
        summed = [name for name in self._fields if name not in ("num_tokens", "logit_max_L")]
        # One sum for all fields; doubles hold every count exactly.
        values = [getattr(self, name) for name in summed]
        flat = world.sum(torch.cat([value.flatten().double() for value in values]))
        parts = flat.split([value.numel() for value in values])
        sums = {
            name: part.view_as(value).to(value.dtype) for name, part, value in zip(summed, parts, values, strict=True)
        }
        return ExpertLoad(num_tokens=self.num_tokens * world.size, logit_max_L=world.max(self.logit_max_L), **sums)

    def metrics(self) -> dict[str, float]:
        """Return the ``moe/…`` metrics; their meaning is in the table of metrics.py."""
        count_LE = self.top_k_count_LE.double()
        over_layers = {
            "load_max_over_mean": count_LE.amax(-1) / count_LE.mean(-1),
            "router_entropy": self.entropy_sum_L.double() / self.num_tokens,
            "z": self.z_sum_L.double() / self.num_tokens,
            "logit_max": self.logit_max_L.double(),
        }
        metrics: dict[str, float] = {}
        for name, value_L in over_layers.items():
            metrics[f"moe/{name}_min"] = float(value_L.min())
            metrics[f"moe/{name}_median"] = float(value_L.median())
            metrics[f"moe/{name}_max"] = float(value_L.max())
        num_pairs = float(count_LE.sum())
        num_tokens = self.num_tokens * count_LE.shape[0]
        metrics["moe/dead_experts_max"] = float((count_LE == 0).sum(-1).max())
        metrics["moe/pairs_added_fraction"] = float(self.pairs_added_L.sum()) / num_pairs
        metrics["moe/pairs_dropped_fraction"] = float(self.pairs_dropped_L.sum()) / num_pairs
        metrics["moe/tokens_without_expert_fraction"] = float(self.tokens_without_expert_L.sum()) / num_tokens
        tile_rows = float(self.tile_rows_L.sum())
        metrics["moe/tile_waste_fraction"] = (tile_rows - float(self.rows_L.sum())) / max(1.0, tile_rows)
        return metrics
