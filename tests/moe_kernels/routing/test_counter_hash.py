"""The hash: fixed for ever, because a resumed run must round as the first did."""

import torch

from moe_kernels.routing.counter_hash import random_bits


def test_values_never_change():
    cpu = torch.device("cpu")
    assert random_bits(0, 3, cpu).tolist() == [2488251732, 263828145, 2933887528]
    assert random_bits(-(2**62) + 7, 3, cpu).tolist() == [3005150955, 1584467380, 1989773951]


def test_bits_are_even_over_seeds_and_counters():
    bits = torch.stack([random_bits(seed, 64, torch.device("cpu")) for seed in range(256)])
    assert bits.min() >= 0
    assert bits.max() < 2**32
    ones = torch.stack([(bits >> place & 1).double().mean() for place in range(32)])
    # 16,384 fair bits each: five standard deviations of their mean.
    assert (ones - 0.5).abs().max() <= 5 * 0.5 / bits.numel() ** 0.5
    for neighbours in (bits[1:] ^ bits[:-1], bits[:, 1:] ^ bits[:, :-1]):
        changed = torch.stack([(neighbours >> place & 1).double().mean() for place in range(32)])
        assert (changed - 0.5).abs().max() <= 5 * 0.5 / neighbours.numel() ** 0.5
