"""AdamW over groups of parameters that decay and that do not. Schedules are in schedule.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.adamw import LargeAdamW
from training.config import OptimConfig, OptimizerStates, Schedule, TrainConfig
from training.schedule import cosine_factor, wsd_factor

_EMBEDDINGS = ("embed.weight", "lm_head.weight")


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return AdamW over every parameter of ``model`` that needs a gradient.

    Matrices decay; norms and biases never do, the embedding and the head as ``optim.decay_embeddings`` says.
    With fp32 states, the fused implementation updates all parameters in one pass on the CPU and on CUDA.

    Raises: ValueError with both ways out if ``optim.states=int8`` and torchao is not installed.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and (config.decay_embeddings or not name.endswith(_EMBEDDINGS))
            (decaying if decays else others).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    if config.states is OptimizerStates.int8:
        return _import_adamw_8bit()(groups, **options)
    return LargeAdamW(groups, **options, fused=True)


def _import_adamw_8bit() -> Any:
    try:
        from torchao.optim import AdamW8bit  # noqa: PLC0415 - an extra that few runs need
    except ImportError as problem:
        raise ValueError(
            "optim.states=int8 needs the torchao package: pip install 'torchao>=0.18,<1', or train with "
            "optim.states=fp32"
        ) from problem
    return AdamW8bit


def learning_rate(step: int, *, optim: OptimConfig, train: TrainConfig) -> float:
    """Return the learning rate of optimiser step ``step`` (from 0)."""
    warmup_steps = round(optim.warmup_fraction * train.num_steps)
    if optim.schedule is Schedule.wsd:
        factor = wsd_factor(
            step,
            num_steps=train.num_steps,
            warmup_steps=warmup_steps,
            decay_steps=round(optim.decay_fraction * train.num_steps),
            final_fraction=optim.final_lr_fraction,
        )
    else:
        factor = cosine_factor(
            step, num_steps=train.num_steps, warmup_steps=warmup_steps, final_fraction=optim.final_lr_fraction
        )
    return optim.lr * factor


def clipped_step(optimizer: Optimizer, norm: Tensor, max_norm: float) -> Tensor:
    """Take the optimiser's step, with gradients scaled so that their joint norm is at most ``max_norm``.

    ``norm`` is what it is now, a scalar on the device. Where it is not finite, parameters, gradients and the
    optimiser's state stay as they are. Returns whether it is finite, on the device too. The fused AdamW reads both
    there, and scales each gradient as it reads it, which saves a pass over all of them; the 8-bit one has no such
    switch, so for it the host waits.
    """
    is_finite = torch.isfinite(norm)
    # clip_grad_norm_'s 1e-6 keeps a norm of 0 from dividing; here nothing divides by it, but the scale is the same.
    scale = ((norm.float() + 1e-6) / max_norm).clamp(min=1.0)
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale, optimizer.found_inf = scale, (~is_finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif bool(is_finite):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        optimizer.step()
    return is_finite


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group, in place where it is a tensor that compiled code reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
