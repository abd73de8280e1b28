"""AdamW over groups of parameters that decay and that do not. Schedules are in schedule.py."""

from torch import nn
from torch.optim import AdamW

from training.config import OptimConfig, Schedule, TrainConfig
from training.schedule import cosine_factor, wsd_factor

_EMBEDDINGS = ("embed.weight", "lm_head.weight")


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Return AdamW over every parameter of ``model`` that needs a gradient.

    Matrices decay; norms and biases never do, the embedding and the head as ``optim.decay_embeddings`` says.
    The fused implementation updates all parameters in one pass on the CPU and on CUDA.
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
    return AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


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


def set_learning_rate(optimizer: AdamW, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
