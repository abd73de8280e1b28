"""What a whole layer starts from. Imports torch alone: benchmarks/cold_start.py times every other import."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import MoEShape


class Inputs(NamedTuple):
    """A layer's input, its router's and its experts' weights, and the gradient of its output; bf16."""

    x_TD: Tensor
    router_ED: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    dout_TD: Tensor


def make_inputs(shape: MoEShape, routing: str, seed: int, device: str = "cuda") -> Inputs:
    """Return random inputs of unit scale whose logits have unit variance; by "zipf", on top of Zipf(1.2) popularity."""
    T, D, N, E, _ = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, device=device, generator=generator, dtype=torch.bfloat16) * scale

    x_TD, router_ED = normal(T, D), normal(E, D, scale=D**-0.5)
    if routing == "zipf":
        # A router has no bias: one column of ones carries the popularity.
        x_TD[:, 0] = 1.0
        router_ED[:, 0] = torch.arange(1, E + 1, device=device).float().log() * -1.2
    return Inputs(x_TD, router_ED, normal(E, 2 * N, D, scale=D**-0.5), normal(E, D, N, scale=N**-0.5), normal(T, D))
