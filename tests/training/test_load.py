import pytest
import torch

from model.moe import MoEStats
from training.load import ExpertLoad


def stats(count_LBE: list[list[list[int]]], row_count_LE: list[list[int]], **other: list[float]) -> MoEStats:
    count = torch.tensor(count_LBE)
    num_layers = count.shape[0]
    zeros = torch.zeros(num_layers)
    return MoEStats(
        top_k_count_BE=count,
        prob_sum_BE=torch.zeros_like(count, dtype=torch.float32),
        z_sum=torch.tensor(other.get("z_sum", zeros.tolist())),
        entropy_sum=torch.tensor(other.get("entropy_sum", zeros.tolist())),
        logit_max=torch.tensor(other.get("logit_max", zeros.tolist())),
        row_count_E=torch.tensor(row_count_LE),
        pairs_added=torch.tensor(other.get("added", zeros.tolist())).long(),
        pairs_dropped=torch.tensor(other.get("dropped", zeros.tolist())).long(),
        tokens_without_expert=torch.tensor(other.get("without", zeros.tolist())).long(),
    )


# Two layers, two sequences, three experts, four tokens, K = 2, so eight pairs a layer.
BALANCED = [[1, 2, 1], [1, 2, 1]]
COLLAPSED = [[4, 0, 0], [4, 0, 0]]
FIRST = stats(
    [BALANCED, COLLAPSED],
    [[2, 4, 2], [6, 0, 0]],
    added=[1, 0],
    dropped=[1, 2],
    without=[0, 1],
    entropy_sum=[4.0, 2.0],
    z_sum=[8.0, 4.0],
    logit_max=[1.0, 3.0],
)


def test_load_metrics_are_per_layer_then_minimum_median_maximum() -> None:
    metrics = ExpertLoad.of(FIRST, num_tokens=4, tile_m=4).metrics()
    assert metrics["moe/load_max_over_mean_min"] == pytest.approx(4 / (8 / 3))
    assert metrics["moe/load_max_over_mean_max"] == pytest.approx(8 / (8 / 3))
    assert metrics["moe/dead_experts_max"] == 2
    assert (metrics["moe/router_entropy_min"], metrics["moe/router_entropy_max"]) == (0.5, 1.0)
    assert metrics["moe/z_max"] == 2.0
    assert metrics["moe/logit_max_max"] == 3.0


def test_rounding_metrics_are_fractions_of_pairs_tokens_and_tile_rows() -> None:
    metrics = ExpertLoad.of(FIRST, num_tokens=4, tile_m=4).metrics()
    assert metrics["moe/pairs_added_fraction"] == pytest.approx(1 / 16)
    assert metrics["moe/pairs_dropped_fraction"] == pytest.approx(3 / 16)
    assert metrics["moe/tokens_without_expert_fraction"] == pytest.approx(1 / 8)
    # Tiles of 4 rows: 4 + 4 + 4 for the first layer's 2 + 4 + 2 rows, 8 for the second's 6.
    assert metrics["moe/tile_waste_fraction"] == pytest.approx((20 - 14) / 20)


def test_two_micro_batches_add_up() -> None:
    second = stats([COLLAPSED, BALANCED], [[8, 0, 0], [4, 4, 0]], logit_max=[2.0, 1.0])
    load = ExpertLoad.sum([ExpertLoad.of(part, num_tokens=4, tile_m=4) for part in (FIRST, second)])
    assert load.num_tokens == 8
    assert load.top_k_count_LE.tolist() == [[10, 4, 2], [10, 4, 2]]
    assert load.logit_max_L.tolist() == [2.0, 3.0]
    assert load.metrics()["moe/dead_experts_max"] == 0
