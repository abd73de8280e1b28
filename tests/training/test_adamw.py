"""Our AdamW takes torch's steps, keeps torch's state, and leaves alone what torch's would."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from training import adamw as adamw_module
from training.adamw import LargeAdamW
from training.config import DeviceName
from training.optim import clipped_step
from training.world import open_world

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

SIZES = [(7, 300), (5000,), (3,)]
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, triton_device: torch.device) -> str:
    """The device that runs the kernel; parameters of 1000 values are large."""
    monkeypatch.setattr(adamw_module, "_WORTH_A_LAUNCH", 1000)
    if triton_device.type == "cpu":
        monkeypatch.setattr(adamw_module, "runs_triton", lambda _: True)
    return triton_device.type


def pair(device: str) -> tuple[LargeAdamW, torch.optim.AdamW]:
    """Return ours and torch's over equal parameters, one group that decays and one that does not."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in SIZES]
    others = copy.deepcopy(parameters)

    def groups(of: list[nn.Parameter]) -> list[dict]:
        return [{"params": of[:1], "weight_decay": 0.1}, {"params": of[1:], "weight_decay": 0.0}]

    ours = LargeAdamW(groups(parameters), **OPTIONS, fused=True)
    return ours, torch.optim.AdamW(groups(others), **OPTIONS, fused=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def set_grads(ours: LargeAdamW, torchs: torch.optim.AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for left, right in zip(parameters_of(ours), parameters_of(torchs), strict=True):
        grad = torch.randn(left.shape, generator=generator) * 10.0**seed
        left.grad, right.grad = (grad.to(left.device, copy=True) for _ in range(2))


def assert_same(ours: LargeAdamW, torchs: torch.optim.AdamW) -> None:
    """Compare by norms: the sums of a moment's two parts round otherwise, and single ones may cancel."""
    for left, right in zip(parameters_of(ours), parameters_of(torchs), strict=True):
        assert ours.state[left].keys() == torchs.state[right].keys()
        pairs = [(left, right), *((value, torchs.state[right][name]) for name, value in ours.state[left].items())]
        for actual, expected in pairs:
            assert (actual - expected).norm() <= 4 * torch.finfo(torch.float32).eps * expected.norm()


def test_steps_are_torchs_with_clipping_and_without(device: str) -> None:
    ours, torchs = pair(device)
    launches = []
    for number in range(4):
        set_grads(ours, torchs, number)
        if number == 3:  # far above the norm that is allowed
            clipped_step(ours, torch.tensor(1000.0, device=device), max_norm=1.0)
            clipped_step(torchs, torch.tensor(1000.0, device=device), max_norm=1.0)
        else:
            ours.step()
            torchs.step()
        launches.append(sum(ours._is_large(parameter) for parameter in parameters_of(ours)))
        assert all(parameter.grad is not None for parameter in parameters_of(ours))
        assert_same(ours, torchs)
    assert launches[-1] == 2, "two of the three parameters are large once they have a state"


def test_sharded_parameters_take_the_same_steps_and_keep_sharded_moments(device: str) -> None:
    world = open_world(DeviceName(device))
    try:
        mesh = init_device_mesh(device, (1,))
        layers = [nn.Linear(40, 50, bias=False, device=device) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        ours = LargeAdamW(layers[0].parameters(), **OPTIONS, fused=True)
        torchs = torch.optim.AdamW(layers[1].parameters(), **OPTIONS, fused=True)
        for _ in range(3):
            for layer, optimizer in zip(layers, (ours, torchs), strict=True):
                layer(torch.linspace(-1.0, 1.0, 40, device=device).expand(4, 40)).square().sum().backward()
                clipped_step(optimizer, torch.tensor(2.0, device=device), max_norm=1.0)
                optimizer.zero_grad(set_to_none=False)
        assert ours._is_large(layers[0].weight)
        moments = [optimizer.state[layer.weight] for layer, optimizer in zip(layers, (ours, torchs), strict=True)]
        for name in ("exp_avg", "exp_avg_sq"):
            assert all(isinstance(state[name], DTensor) for state in moments)
            actual, expected = (state[name].to_local() for state in moments)
            assert (actual - expected).norm() <= 1e-5 * expected.norm()
        actual, expected = (layer.weight.to_local() for layer in layers)
        assert (actual - expected).norm() <= 1e-6 * expected.norm()
    finally:
        world.close()


def test_a_norm_that_is_not_finite_changes_nothing(device: str) -> None:
    ours, torchs = pair(device)
    set_grads(ours, torchs, 0)
    ours.step()
    before = copy.deepcopy([(p.detach(), ours.state[p]) for p in parameters_of(ours)])
    set_grads(ours, torchs, 1)
    assert not clipped_step(ours, torch.tensor(float("nan"), device=device), max_norm=1.0)
    for (old, old_state), parameter in zip(before, parameters_of(ours), strict=True):
        assert torch.equal(parameter, old)
        assert all(torch.equal(value, old_state[name]) for name, value in ours.state[parameter].items())


def test_the_state_goes_on_in_torchs_optimiser_and_back(device: str) -> None:
    ours, torchs = pair(device)
    for number in range(2):
        set_grads(ours, torchs, number)
        ours.step()
        torchs.step()
    one, other = ours.state_dict(), torchs.state_dict()
    ours.load_state_dict(other)
    torchs.load_state_dict(one)
    set_grads(ours, torchs, 2)
    ours.step()
    torchs.step()
    assert_same(ours, torchs)


def test_what_the_kernel_does_not_take_goes_to_torch(device: str) -> None:
    ours, torchs = pair(device)
    set_grads(ours, torchs, 0)
    ours.step()
    large = parameters_of(ours)[0]
    assert ours._is_large(large)
    assert large.grad is not None
    large.grad = large.grad.t().contiguous().t()
    assert not ours._is_large(large), "a gradient that lies otherwise"
    for optimizer in (ours, torchs):
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()  # nothing has a gradient
    set_grads(ours, torchs, 1)
    assert ours.step(lambda: 3.0) == 3.0
