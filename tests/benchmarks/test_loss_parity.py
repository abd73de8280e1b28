"""Two backends are judged by the spread of seeds: what is as far apart as two seeds, or farther, fails."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.loss_parity import distance, judge, main

TINY = (
    *("--shape", "tiny", "--layers", "1", "--sequence-length", "64", "--micro-batch-sequences", "4", "--tile-m", "32"),
    *("--precision", "fp32", "--steps", "2", "--seeds", "2", "--lr", "0.01", "--backend", "reference"),
)
SMALLER = ("model.width=32", "model.moe.num_experts=4", "model.moe.experts_per_token=2", "model.vocab_size=512")


def test_distance_is_the_mean_absolute_difference() -> None:
    assert distance(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 4.0])) == 1.5


@pytest.mark.parametrize(("apart", "holds"), [(0.5, True), (1.5, False), (2.0, False)])
def test_backends_have_to_be_closer_than_the_seeds_that_are_farthest_apart(apart: float, holds: bool) -> None:
    seeds = [torch.tensor([3.0, 2.0]) + shift for shift in (0.0, 1.0, 1.5)]
    result = judge(torch.tensor([3.0, 2.0]), torch.tensor([3.0, 2.0]) + apart, seeds)
    assert result["holds"] is holds
    assert result["seeds_nats"] == {"0-1": 1.0, "0-2": 1.5, "1-2": 0.5}


def test_a_backend_that_cannot_run_here_ends_in_a_message(prepared_root: Path) -> None:
    arguments = [*TINY, "--data", str(prepared_root), "--set", *SMALLER, "--backend", "cute_sm90"]
    try:
        with pytest.raises(SystemExit, match=r"^error: no MoE backend for kernels\.backend=cute_sm90"):
            main(arguments)  # in fp32, which it has on no machine
    finally:
        torch.distributed.destroy_process_group()


def test_two_ways_to_the_same_numbers_hold(prepared_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*TINY, "--data", str(prepared_root), "--json", str(out), "--set", *SMALLER]) == 0
    result = json.loads(out.read_text())
    assert result["backends_nats"] < 1e-5 < result["largest_of_seeds_nats"]
    assert len(result["losses"]["reference"]) == len(result["losses_of_seeds"][1]) == 2
