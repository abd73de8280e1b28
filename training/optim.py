"""AdamW over two groups of parameters: matrices decay, norms and biases do not. Schedules are in schedule.py."""

from torch import nn
from torch.optim import AdamW

from training.config import OptimConfig, TrainConfig
from training.schedule import cosine_factor


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Return AdamW over every parameter of ``model`` that needs a gradient.

    The fused implementation updates all parameters in one pass on the CPU and on CUDA.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def learning_rate(step: int, *, optim: OptimConfig, train: TrainConfig) -> float:
    """Return the learning rate of optimiser step ``step`` (from 0)."""
    return optim.lr * cosine_factor(
        step,
        num_steps=train.num_steps,
        warmup_steps=round(optim.warmup_fraction * train.num_steps),
        final_fraction=optim.final_lr_fraction,
    )


def set_learning_rate(optimizer: AdamW, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
