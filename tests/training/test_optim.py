import copy

import pytest
import torch
from torch import nn

from training.config import OptimConfig, Schedule, TrainConfig
from training.optim import build_optimizer, clipped_step, learning_rate, set_learning_rate
from training.parallel import gradient_norm


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.RMSNorm(3)})
    model.register_parameter("experts", nn.Parameter(torch.zeros(2, 3, 4)))
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"linear.weight": 0.5, "linear.bias": 0.0, "norm.weight": 0.0, "experts": 0.5}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == expected


def test_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(3, 2), OptimConfig(lr=0.1))
    set_learning_rate(optimizer, 0.025)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]


def test_warm_up_is_a_fraction_of_the_run() -> None:
    optim = OptimConfig(lr=1.0, warmup_fraction=0.1)
    train = TrainConfig(num_steps=50, micro_batch_sequences=1, global_batch_sequences=1)
    assert learning_rate(4, optim=optim, train=train) < 1.0
    assert learning_rate(5, optim=optim, train=train) == 1.0


def test_embeddings_decay_only_if_asked_to() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "linear": nn.Linear(3, 2)})
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5, decay_embeddings=False))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"embed.weight": 0.0, "linear.weight": 0.5, "linear.bias": 0.0}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == expected


def test_schedule_is_the_one_named() -> None:
    train = TrainConfig(num_steps=100, micro_batch_sequences=1, global_batch_sequences=1)
    rates = {
        schedule: learning_rate(70, optim=OptimConfig(lr=1.0, schedule=schedule), train=train) for schedule in Schedule
    }
    assert rates[Schedule.wsd] == 1.0
    assert rates[Schedule.cosine] < 0.5


@pytest.mark.parametrize("factor", [0.01, 100.0], ids=["below", "above"])
def test_a_clipped_step_is_the_one_after_clip_grad_norm(factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    other = copy.deepcopy(model)
    optimizer, reference = (build_optimizer(each, OptimConfig(lr=0.1)) for each in (model, other))
    for number in range(3):
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            left.grad = factor * (number + 1) * torch.randn_like(left)
            right.grad = left.grad.clone()
        is_finite = clipped_step(optimizer, gradient_norm(model), max_norm=1.0)
        norm = nn.utils.clip_grad_norm_(other.parameters(), max_norm=1.0)
        assert bool(is_finite)
        assert bool(norm > 1.0) is (factor > 1.0)
        reference.step()
        # Divided by the scale here, multiplied by its reciprocal there: a few roundings of fp32 apart.
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-6, atol=0.0)
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
